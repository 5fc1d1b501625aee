"""Requests for objects: from HTTP to operations, and back."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import msgspec
import yaml
from aiohttp import web

from cluster import deleting, kinds, patches, refusals, selectors, watching
from cluster.kinds import Kind
from cluster.operations import Operations, Options
from cluster.refusals import Object
from cluster.store import Store
from cluster.targets import Target

_MERGE_PATCH = "application/merge-patch+json"
_STRATEGIC_PATCH = "application/strategic-merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
_PATCHES = [_MERGE_PATCH, _STRATEGIC_PATCH, APPLY_PATCH]

_LONGEST_WATCH_S = 1800.0


def answer(thing: Any, code: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(thing), status=code, content_type="application/json"
    )


async def body(request: web.Request) -> Any:
    """Return the JSON or YAML body of a request.

    Raises Refused: the body is neither (400).
    """
    data = await request.read()
    if not data:
        return {}
    try:
        return yaml.safe_load(data) if "yaml" in request.content_type else msgspec.json.decode(data)
    except (msgspec.DecodeError, yaml.YAMLError) as error:
        raise refusals.bad_request(f"error decoding the body: {error}") from error


async def body_object(request: web.Request) -> Object:
    found = await body(request)
    if not isinstance(found, dict):
        raise refusals.bad_request("the body of the request is no object")
    return found


class Rest:
    """The verbs of all kinds."""

    def __init__(self, operations: Operations, time_scale: float) -> None:
        self.operations = operations
        self.store: Store = operations.store
        self.scale = time_scale
        self.lines: set[watching.Line] = set()

    async def handle(self, request: web.Request, target: Target, verb: str) -> web.StreamResponse:
        """Answer a request for a collection, an object or its status."""
        options = _options(request, target.subresource)
        if verb == "list":
            return await self._list(request, target)
        if verb == "watch":
            return await self.watch(request, target)
        if verb == "get":
            return answer(self.operations.get(target.kind, target.namespace, target.name))
        if verb == "create":
            if target.name:
                raise refusals.not_allowed()
            wanted = await body_object(request)
            made = self.operations.create(target.kind, target.namespace, wanted, options)
            return answer(made, 201)
        if verb == "update":
            wanted = await body_object(request)
            if (wanted.get("metadata") or {}).get("name", target.name) != target.name:
                raise refusals.bad_request(
                    "the name of the object does not match the name on the URL"
                )
            wanted.setdefault("metadata", {})["name"] = target.name
            return answer(self.operations.replace(target.kind, target.namespace, wanted, options))
        if verb == "patch":
            return await self._patch(request, target, options)
        return await self._delete(request, target, verb)

    async def _list(self, request: web.Request, target: Target) -> web.Response:
        query = request.query
        asked = query.get("resourceVersion", "")
        if asked.isdigit() and int(asked) > self.store.version:
            await asyncio.sleep(3.0 * self.scale)
            if int(asked) > self.store.version:
                raise refusals.too_large(int(asked), self.store.version)
        if query.get("resourceVersionMatch") == "Exact" and int(asked) < self.store.oldest:
            raise refusals.compacted()
        found = self._found(target, query)
        version, start = str(self.store.version), ["", ""]
        if token := query.get("continue"):
            version, start = _decode_token(token)
            if int(version) < self.store.oldest:
                raise refusals.compacted()
        rest = [thing for thing in found if _key(thing) > start]
        metadata: Object = {"resourceVersion": version}
        limit = int(query.get("limit", "0") or 0)
        if limit and len(rest) > limit:
            metadata["continue"] = _encode_token(version, _key(rest[limit - 1]))
            if "labelSelector" not in query and "fieldSelector" not in query:
                metadata["remainingItemCount"] = len(rest) - limit
            rest = rest[:limit]
        return answer(_as_list(target.kind, metadata, rest))

    async def watch(self, request: web.Request, target: Target) -> web.StreamResponse:
        query = request.query
        matches = _selection(target, query)
        wanted = watching.Wanted(
            kind=target.kind,
            namespace=target.namespace,
            matches=matches,
            version=query.get("resourceVersion", ""),
            timeout=float(query.get("timeoutSeconds", "") or _LONGEST_WATCH_S),
            bookmarks=query.get("allowWatchBookmarks", "") in ("true", "True", "1"),
            initial=query.get("sendInitialEvents", "") in ("true", "True", "1"),
        )
        line = watching.Line(request, request.get("cut_after"))
        self.lines.add(line)
        try:
            try:
                events = watching.changes(self.store, wanted, self.scale)
            except refusals.Refused as refused:
                # The refusal is an event of the watch, as in the watch cache of a real server.
                await line.open("application/json")
                fields = {"type": "ERROR", "object": refused.status()}
                await line.send(msgspec.json.encode(fields) + b"\n")
                return line.response
            await line.open("application/json")
            await watching.send_all(line, events)
        finally:
            self.lines.discard(line)
        return line.response

    async def _patch(
        self, request: web.Request, target: Target, options: Options
    ) -> web.StreamResponse:
        media_type = request.content_type
        known = [each for each in _PATCHES if each != _STRATEGIC_PATCH or not target.kind.custom]
        if media_type not in known:
            raise refusals.unsupported_patch(media_type, known)
        patch = await body(request)
        if media_type == APPLY_PATCH:
            if not isinstance(patch, dict):
                raise refusals.bad_request("what is applied must be an object")
            there = self.store.look(target.kind, target.namespace, target.name)
            made = self.operations.apply(target.kind, target.namespace, target.name, patch, options)
            return answer(made, 200 if there else 201)
        how = patches.merge if media_type == _MERGE_PATCH else patches.strategic
        changed = self.operations.change(
            target.kind, target.namespace, target.name, lambda thing: how(thing, patch), options
        )
        return answer(changed)

    async def _delete(self, request: web.Request, target: Target, verb: str) -> web.Response:
        options = deleting.DeleteOptions.read(await body_object(request), request.query)
        if verb == "delete":
            result = deleting.delete(
                self.operations, target.kind, target.namespace, target.name, options
            )
            return answer(result)
        found = self._found(target, request.query)
        for thing in found:
            deleting.delete(
                self.operations,
                target.kind,
                thing["metadata"].get("namespace", ""),
                thing["metadata"]["name"],
                options,
            )
        return answer(_as_list(target.kind, {"resourceVersion": str(self.store.version)}, found))

    def _found(self, target: Target, query: Any) -> list[Object]:
        matches = _selection(target, query)
        return [thing for thing in self.store.all(target.kind, target.namespace) if matches(thing)]


def _options(request: web.Request, subresource: str) -> Options:
    query = request.query
    if asked := set(query.getall("dryRun", [])) - {"All"}:
        raise refusals.unsupported_dry_run(asked)
    return Options(
        dry_run="dryRun" in query,
        manager=query.get("fieldManager", ""),
        strict=query.get("fieldValidation") == "Strict",
        subresource=subresource,
    )


def _selection(target: Target, query: Any) -> selectors.Test:
    tests = []
    if text := query.get("labelSelector"):
        tests.append(selectors.labels(text))
    if text := query.get("fieldSelector"):
        tests.append(selectors.fields(text))
    if target.name:  # a watch of one object
        tests.append(lambda thing: thing["metadata"]["name"] == target.name)
    return lambda thing: all(test(thing) for test in tests)


def _as_list(kind: Kind, metadata: Object, items: list[Object]) -> Object:
    return {
        "kind": f"{kind.kind}List",
        "apiVersion": kind.api_version,
        "metadata": metadata,
        "items": items,
    }


def _key(thing: Object) -> list[str]:
    return [thing["metadata"].get("namespace", ""), thing["metadata"]["name"]]


def _encode_token(version: str, key: list[str]) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode([version, key])).decode()


def _decode_token(token: str) -> tuple[str, list[str]]:
    try:
        version, key = msgspec.json.decode(base64.urlsafe_b64decode(token))
    except ValueError as error:
        raise refusals.bad_request(f"continue key is not valid: {error}") from error
    return version, key


def may_have_status(target: Target) -> bool:
    return target.subresource == "status" and (
        target.kind.has_status or target.kind is kinds.NAMESPACES
    )
