"""Make pydantic models for Prefect's forms from the structs of settings.

`Annotated[Policy, Form()]` is a field whose value is a `Policy`. Pydantic validates the input with
a model of the same fields, so that Prefect shows one input for each.
"""

from __future__ import annotations

import enum
import functools
import re
import types
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    create_model,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, core_schema

from rekindle.errors import UsageError
from rekindle.recovery.policy.policy import MOST
from rekindle.settings import CHOICES, declared

_CONSTRAINTS = ("ge", "gt", "le", "lt", "pattern", "description", "title")
_OF_PYDANTIC = re.compile(r"[\[(]")  # in the name of a validator, and in no name of a field
# Options of a command in messages, and the fields of the form that stand for them.
_OPTIONS = (
    (re.compile(r"--framework (\w+)"), r"the framework \1"),
    (re.compile(r"--no-python for a script that is any program"), "the field program"),
    (re.compile(r"--no-python"), "program"),
    (re.compile(r"--nnodes=(\d+), not with \d+:\d+"), r"nodes \1 and min_nodes 0"),
    (re.compile(r"--job-id (\S+?);"), r"job_id \1;"),
    (
        re.compile(r"give --resume-from \S+ and another --checkpoint-dir, or none"),
        "no form does it",
    ),
    (re.compile(r"--kubeconfig FILE and --context NAME"), "the variable KUBECONFIG of the worker"),
)
Filled = TypeVar("Filled", bound=BaseModel)


class Form:
    """Makes a field of a form from a struct.

    `title`: of the form. `check` refuses values that contradict each other. It raises UsageError or
    ValueError.
    """

    def __init__(self, title: str = "", check: Callable[[Any], None] | None = None) -> None:
        self._title = title
        self._check = check

    def __get_pydantic_core_schema__(
        self, source: type[msgspec.Struct], handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        def read(value: Any, validate: Callable[[Any], BaseModel]) -> msgspec.Struct:
            is_struct = isinstance(value, source)  # by Python code, which checks no types
            found = _struct(value if is_struct else validate(value).model_dump(), source)
            if self._check is not None:
                try:
                    self._check(found)
                except UsageError as error:
                    raise ValueError(str(error)) from error
            return found

        return core_schema.no_info_wrap_validator_function(
            read,
            handler.generate_schema(model_of(source, self._title or source.__name__)),
            serialization=core_schema.plain_serializer_function_ser_schema(_plain),
        )


class BlockChoice:
    """Makes a field of a form in which a person picks a block of this type.

    The value is the name of the block, as in files, or the id of the block that was picked.
    """

    def __init__(self, slug: str) -> None:
        self._slug = slug

    def __get_pydantic_core_schema__(
        self, source: type[str], handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_before_validator_function(_picked, handler.generate_schema(str))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        picked = {"type": "object", "properties": {"$ref": {}}, "required": ["$ref"]}
        return {"block_type_slug": self._slug, "anyOf": [{"type": "string"}, picked]}


def _picked(value: object) -> object:
    """Return the id of the block that a person has picked, or any other value unchanged."""
    match value:
        case {"$ref": {"block_document_id": id_}}:
            return str(id_)
        case None:
            return ""
        case Mapping():
            raise ValueError("pick a block, or give its name")
    return value


def read(kind: type[Filled], value: object, name: str) -> Filled:
    """Return a form from the values that a person gives. name: of the parameter.

    Raises UsageError: the text is one line, and has each wrong field.
    """
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise UsageError(mistakes(error, name)) from None


def mistakes(error: ValidationError, name: str = "") -> str:
    """Return all wrong fields in one line. name: stands before the names of the fields."""
    found = error.errors(include_url=False, include_context=True, include_input=False)
    return "; ".join(_mistake(each, name) for each in found)


def _mistake(found: ErrorDetails, name: str) -> str:
    words = [str(each) for each in found["loc"] if not _OF_PYDANTIC.search(str(each))]
    field = ".".join(filter(None, (name, *words)))
    if found["type"] == "extra_forbidden":
        return f"{field}: there is no such field; remove it, or correct its name"
    if found["type"] == "missing":
        return f"{field}: give a value"
    if found["type"] == "literal_error":
        choices = found["ctx"]["expected"].replace(" or ", ", ").replace("'", "")
        return f"{field}: choose from {choices}"
    return f"{field}: {found['msg'].removeprefix('Value error, ')}"


def of_form(text: str) -> str:
    """Return a message with the names of a form's fields instead of a command's options."""
    for option, field in _OPTIONS:
        text = option.sub(field, text)
    return text


def setting(default: msgspec.Struct, description: str) -> Any:
    """Return the default of a field whose type is a struct."""
    # Pydantic cannot write a struct as JSON, so the schema gets the default as plain values.
    return Field(
        default_factory=lambda: default,
        description=description,
        json_schema_extra={"default": _plain(default)},
    )


def _struct(value: Any, kind: type[msgspec.Struct]) -> msgspec.Struct:
    try:
        return msgspec.convert(msgspec.to_builtins(value), kind)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error


def _plain(value: Any) -> Any:
    """Return the JSON form of a value."""
    return msgspec.json.decode(msgspec.json.encode(value))


@functools.cache
def model_of(struct: type[msgspec.Struct], title: str) -> type[BaseModel]:
    """Return a pydantic model with a struct's fields: types, limits, defaults, descriptions.

    title: the name of the form.
    """
    config = ConfigDict(extra="forbid", title=title)
    fields: dict[str, Any] = _fields(struct)
    return create_model(title, __config__=config, __doc__=struct.__doc__, **fields)


def field_of(struct: type[msgspec.Struct], name: str) -> Any:
    """Return the field of a form, as the struct declares it: default, limits and description."""
    return _fields(struct)[name][1]


def _fields(struct: type[msgspec.Struct]) -> dict[str, tuple[Any, Any]]:
    hints = get_type_hints(struct, include_extras=True)
    return {
        field.name: (_type(hints[field.name]), _field(hints[field.name], _default(field)))
        for field in msgspec.structs.fields(struct)
    }


def _field(hint: Any, default: Any) -> Any:
    constraints = _constraints_of(declared(hint))
    if allowed := _allowed(hint, constraints):
        constraints["description"] = f"{constraints['description']} {allowed}"
    if _is_number(hint):
        constraints["allow_inf_nan"] = False
    if default is msgspec.NODEFAULT:
        return Field(**constraints)
    if not isinstance(default, msgspec.Struct):
        return Field(default=_plain(default), **constraints)
    extra = {"default": _plain(default)}
    return Field(default_factory=lambda: default, json_schema_extra=extra, **constraints)


def _allowed(hint: Any, constraints: Mapping[str, Any]) -> str:
    """Return the values that a field takes, in a sentence; empty: its description has them."""
    kind = _type(hint)
    item = get_args(kind)[0] if get_origin(kind) is list else kind
    if get_origin(item) is Literal:
        several = "any of " if item is not kind else ""
        return f"Allowed: {several}{', '.join(str(each) or 'empty' for each in get_args(item))}."
    for member in get_args(kind) if get_origin(kind) is Union else ():
        if get_origin(member) is Annotated:
            constraints = {**constraints, **_limits_of(get_args(member)[1])}
    words = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
    limits = [
        f"{word} {constraints[name]}"
        for name, word in words.items()
        if name in constraints and constraints[name] != MOST
    ]
    return f"Allowed: {' and '.join(limits)}." if limits else ""


def _limits_of(field: FieldInfo) -> dict[str, Any]:
    limits = ((name, getattr(one, name, None)) for one in field.metadata for name in _CONSTRAINTS)
    return {name: value for name, value in limits if value is not None}


def _constraints_of(meta: msgspec.Meta | None) -> dict[str, Any]:
    """Return the constraints of a declaration, in pydantic's terms."""
    constraints = {name: getattr(meta, name, None) for name in _CONSTRAINTS}
    return {name: value for name, value in constraints.items() if value is not None}


def _default(field: msgspec.structs.FieldInfo) -> Any:
    """Return the default of a field; NODEFAULT: a person must give it."""
    factory = field.default_factory
    return field.default if factory is msgspec.NODEFAULT else factory()


def _type(hint: Any) -> Any:
    meta = declared(hint)
    bare = get_args(hint)[0] if meta is not None else hint
    choices = (meta.extra or {}).get(CHOICES) if meta is not None else None
    return _of(bare, choices)


def _of(hint: Any, choices: Any = None) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is str and choices:
        return Literal[tuple(choices)]
    if origin is Annotated:  # inside a union
        return Annotated[_of(arguments[0]), Field(**_constraints_of(declared(hint)))]
    if origin is tuple:
        return list[_item(arguments[0], choices)]  # type: ignore[misc]
    if origin in (Union, types.UnionType):
        return Union[tuple(_of(each) for each in arguments)]  # noqa: UP007  # made at run time
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return Literal[tuple(each.value for each in hint)]
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return Annotated[hint, Form()]
    return hint


def _item(hint: Any, choices: Any) -> Any:
    """Return the type of a list's item. The order of a list is that of a person's choices."""
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return Literal[tuple(each.value for each in choices or hint)]
    return _of(hint, choices)


def _is_number(hint: Any) -> bool:
    return hint is float or (get_origin(hint) is Annotated and get_args(hint)[0] is float)
