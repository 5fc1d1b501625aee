"""What we may do in a cluster, asked before it is tried."""

from __future__ import annotations

from rekindle.engines.kubernetes.api import Api

_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


def may(api: Api, verb: str, resource: str) -> bool:
    """Whether we may do this in the whole cluster, as the server sees it now. Raises ApiError.

    A request that is refused would be tried again for half a minute: the server may have restarted.
    """
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {"verb": verb, "resource": resource}},
    }
    return bool((api.create(_REVIEWS, review).get("status") or {}).get("allowed"))
