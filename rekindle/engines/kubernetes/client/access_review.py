"""What we may do in a cluster, asked before it is tried."""

from __future__ import annotations

from rekindle.engines.kubernetes.client.api import Api

_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


def may(api: Api, verb: str, resource: str, *, group: str = "", namespace: str = "") -> bool:
    """Whether we may do this, as the server sees it now. Raises ApiError.

    resource: with its subresource, as pods/log. namespace: "": in the whole cluster.

    A request that is refused would be tried again for half a minute: the server may have restarted.
    """
    plural, _, subresource = resource.partition("/")
    asked = {"verb": verb, "group": group, "resource": plural, "subresource": subresource}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": asked | ({"namespace": namespace} if namespace else {})},
    }
    return bool((api.create(_REVIEWS, review).get("status") or {}).get("allowed"))
