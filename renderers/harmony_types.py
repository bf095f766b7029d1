"""Tools as harmony declares them: a namespace of TypeScript types.

    // The weather of a city.
    type weather = (_: {
    // City name
    city: string,
    // A place
    where?:     // A place
    {
        country: string, // default: "no"
        } | null,
    unit?: "c" | "f", // default: c
    }) => any;

What looks odd here is harmony's, as the models saw it in training: an object within another says its description twice and
indents it before its brace, defaults of enums stand without quotes, `oneOf` takes a line for each variant, and what this
small language cannot say (anyOf, $ref, null, const) is `any`.
"""

import json
from typing import Any


def typescript(function: dict) -> str:
    """The declaration of a tool, as harmony writes it."""
    description, schema = function.get("description") or "", function.get("parameters")
    comment = "".join(f"// {line}\n" for line in description.removesuffix("\n").split("\n")) if description else ""
    argument = "" if schema is None else f"_: {type_of(schema)}"
    return f"{comment}type {function['name']} = ({argument}) => any;\n\n"


def type_of(schema: Any, indent: str = "", in_property: bool = False) -> str:
    """A JSON schema as a TypeScript type; `in_property`: it is a property's, which has described a `oneOf` already."""
    description = field(schema, "description", str)
    if variants := field(schema, "oneOf", list):
        lines = []
        for number, variant in enumerate(variants):
            note, default = field(variant, "description", str), default_of(variant, quoted=not in_property)
            if in_property and description is not None and (number == 0 or note == description):
                note = None
            notes = " ".join(text for text in (note, default) if text is not None)
            shown = f" // {notes}" if note is not None or default is not None else ""
            lines.append(f"\n{indent} | {or_null(variant, type_of(variant, indent + '   '))}{shown}")
        return "".join(lines)
    if names := [name for name in field(schema, "type", list) or [] if isinstance(name, str)]:
        return " | ".join("number" if name == "integer" else name for name in names)
    kind = field(schema, "type", str)
    if kind == "object":
        comment = "" if description is None else f"{indent}// {description}\n"
        required = field(schema, "required", list) or []
        properties = (field(schema, "properties", dict) or {}).items()
        lines = [property_of(name, value, name in required, indent) for name, value in properties]
        return f"{comment}{{\n{''.join(lines)}{indent}}}"
    if kind == "array":
        return f"{type_of(schema['items'], indent)}[]" if "items" in schema else "Array<any>"
    if kind == "string":
        values = field(schema, "enum", list) or []
        return " | ".join(f'"{value}"' for value in values if isinstance(value, str)) or "string"
    return {"integer": "number", "number": "number", "boolean": "boolean"}.get(kind, "any")


def property_of(name: str, schema: Any, required: bool, indent: str) -> str:
    """One property with its comments: title, description, examples, and in a `oneOf` the default."""
    title, description, default = field(schema, "title", str), field(schema, "description", str), default_of(schema)
    examples, variants = field(schema, "examples", list), field(schema, "oneOf", list)
    comments = [] if title is None else [f" {title}", ""]
    said = [] if description is None else [f" {description}"]
    listed = [f' - "{example}"' for example in examples or [] if isinstance(example, str)]
    listed = [" Examples:", *listed] if examples else []
    key = name + ("" if required else "?") + ":"
    if variants:
        repeated = field(variants[0], "description", str) == description
        comments += listed + ([] if repeated else said) + ([] if default is None else [f" {default}"])
        written = f"{key}{type_of(schema, indent, in_property=True)}\n{indent},"
    else:
        comments += said + listed
        written = f"{key} {or_null(schema, type_of(schema, indent + '    '))},"
        written += "" if default is None else f" // {default}"
    return "".join(f"{indent}//{comment}\n" for comment in comments) + f"{indent}{written}\n"


def or_null(schema: Any, written: str) -> str:
    """The type, or null where OpenAPI's `nullable` says so."""
    return written + (" | null" if field(schema, "nullable", bool) and "null" not in written else "")


def default_of(schema: Any, quoted: bool = False) -> str | None:
    """The note of a schema's default, None where it has none. `quoted`: also that of an enum stands in quotes."""
    if not isinstance(schema, dict) or "default" not in schema:
        return None
    value = schema["default"]
    is_enum = bool(field(schema, "enum", list))
    if isinstance(value, str) and not (is_enum and quoted):
        return f"default: {value}" if is_enum else f'default: "{value}"'
    return "default: " + json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def field(schema: Any, key: str, kind: type) -> Any:
    """What a schema says under `key`; None where that is not of its kind."""
    value = schema.get(key) if isinstance(schema, dict) else None
    return value if isinstance(value, kind) else None
