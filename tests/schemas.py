"""Awkward JSON schemas, all of which can be enforced: nested, recursive, alternatives, patterns, formats, ranges."""

from typing import Any

SCHEMAS: list[dict[str, Any]] = [
    {"type": "object"},
    {},
    {"type": "object", "properties": {}},
    {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "minLength": 2},
            "n": {"type": "integer", "minimum": 150, "maximum": 250},
        },
        "required": ["city", "n"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {
            "a": {
                "type": "object",
                "properties": {
                    "b": {
                        "type": "object",
                        "properties": {
                            "c": {
                                "type": "array",
                                "items": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
                                "minItems": 1,
                            }
                        },
                        "required": ["c"],
                    }
                },
                "required": ["b"],
            }
        },
        "required": ["a"],
    },
    {
        "$defs": {
            "n": {
                "type": "object",
                "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}},
                "required": ["v", "next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/n",
    },
    {
        "$defs": {
            "t": {
                "type": "object",
                "properties": {"k": {"type": "array", "items": {"$ref": "#/$defs/t"}, "maxItems": 3}},
                "required": ["k"],
            }
        },
        "type": "object",
        "properties": {"root": {"$ref": "#/$defs/t"}},
        "required": ["root"],
    },
    {
        "type": "object",
        "properties": {
            "x": {
                "anyOf": [
                    {"type": "string"},
                    {"type": "integer"},
                    {"type": "null"},
                    {
                        "type": "object",
                        "properties": {"deep": {"type": "string", "minLength": 30}},
                        "required": ["deep"],
                    },
                ]
            }
        },
        "required": ["x"],
    },
    {
        "type": "object",
        "properties": {"e": {"enum": ["alpha", "beta", 3, None, True, {"a": 1}, [1, 2]]}},
        "required": ["e"],
    },
    {
        "type": "object",
        "properties": {"c": {"const": "fixed value"}, "d": {"const": {"k": [1]}}},
        "required": ["c", "d"],
    },
    {
        "type": "object",
        "properties": {
            "p": {"type": "string", "pattern": "^[A-Z]{2}-\\d{4}$"},
            "q": {"type": "string", "pattern": "^(ab)*c$"},
        },
        "required": ["p", "q"],
    },
    {"type": "object", "properties": {"p": {"type": "string", "pattern": "[0-9]{3}-[a-z]+@"}}, "required": ["p"]},
    {
        "type": "object",
        "properties": {
            "d": {"type": "string", "format": "date-time"},
            "u": {"type": "string", "format": "uuid"},
            "m": {"type": "string", "format": "email"},
            "i": {"type": "string", "format": "ipv4"},
        },
        "required": ["d", "u", "m", "i"],
    },
    {
        "type": "object",
        "properties": {
            "f": {"type": "number", "minimum": -1.5, "maximum": 2.25},
            "g": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
            "h": {"type": "integer", "multipleOf": 7, "minimum": 100},
        },
        "required": ["f", "g", "h"],
    },
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {
        "type": "object",
        "additionalProperties": False,
        "properties": {f"opt{i}": {"type": "string"} for i in range(12)} | {"zreq": {"type": "boolean"}},
        "required": ["zreq"],
    },
    {"type": "object", "patternProperties": {"^x[0-9]+$": {"type": "integer"}}, "additionalProperties": False},
    {"type": "object", "properties": {"s": {"type": "string", "minLength": 50, "maxLength": 60}}, "required": ["s"]},
    {
        "type": "object",
        "properties": {
            "l": {
                "type": "array",
                "minItems": 10,
                "maxItems": 12,
                "items": {
                    "type": "object",
                    "properties": {"a": {"type": "number"}},
                    "required": ["a"],
                    "additionalProperties": False,
                },
            }
        },
        "required": ["l"],
    },
    {
        "type": "object",
        "properties": {
            "t": {
                "type": "array",
                "prefixItems": [{"type": "string"}, {"type": "integer"}],
                "items": False,
                "minItems": 2,
            }
        },
        "required": ["t"],
    },
    {
        "type": "object",
        "properties": {"n": {"type": ["string", "null"]}, "m": {"type": ["integer", "boolean", "array"]}},
        "required": ["n", "m"],
    },
    {
        "type": "object",
        "allOf": [
            {"properties": {"a": {"type": "string"}}, "required": ["a"]},
            {"properties": {"b": {"type": "integer"}}, "required": ["b"]},
        ],
    },
    {
        "type": "object",
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    },
    {
        "type": "object",
        "properties": {
            "v": {
                "anyOf": [
                    {
                        "type": "object",
                        "properties": {"k": {"const": "a"}, "v": {"type": "integer"}},
                        "required": ["k", "v"],
                    },
                    {
                        "type": "object",
                        "properties": {"k": {"const": "b"}, "w": {"type": "string"}},
                        "required": ["k", "w"],
                    },
                ]
            }
        },
        "required": ["v"],
    },
    {"type": "object", "properties": {"o": {"oneOf": [{"type": "string"}, {"type": "integer"}]}}, "required": ["o"]},
    {
        "type": "object",
        "properties": {'weird "key"\\ é\n': {"type": "string"}, "日本": {"type": "integer"}},
        "required": ['weird "key"\\ é\n', "日本"],
    },
    {
        "type": "object",
        "properties": {"e": {"type": "string", "enum": ["", 'a"b', "\u2028", "tab\t", "😀"]}},
        "required": ["e"],
    },
    {
        "type": "object",
        "properties": {"big": {"type": "integer", "minimum": 1000000000000}, "neg": {"type": "integer", "maximum": -5}},
        "required": ["big", "neg"],
    },
    {
        "type": "object",
        "properties": {
            "opt": {"type": "array", "minItems": 20, "items": {"type": "string", "minLength": 5}},
            "r": {"type": "boolean"},
        },
        "required": ["r"],
        "additionalProperties": False,
    },
    {"type": "object", "properties": {"r": {"type": "string", "maxLength": 3}}, "required": ["r"], "maxProperties": 1},
    {"type": "object", "minProperties": 1, "properties": {"r": {"type": "string", "maxLength": 0}}, "required": ["r"]},
    {
        "type": "object",
        "properties": {
            "h": {"type": "string", "pattern": "^#[0-9a-f]{6}$"},
            "s": {"type": "string", "pattern": "^\\S+ \\S+$"},
        },
        "required": ["h", "s"],
    },
    {
        "type": "object",
        "properties": {f"r{i}": {"type": ["number", "null"]} for i in range(15)},
        "required": [f"r{i}" for i in range(15)],
    },
    {
        "type": "object",
        "properties": {
            "a": {"$ref": "#/properties/b"},
            "b": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 1},
        },
        "required": ["a", "b"],
    },
    {"type": "object", "properties": {"any": True, "none": {}}, "required": ["any", "none"]},
    {
        "type": "object",
        "properties": {
            "m": {
                "type": "array",
                "items": {
                    "type": "array",
                    "items": {"type": "array", "items": {"type": "boolean"}, "minItems": 1},
                    "minItems": 1,
                },
                "minItems": 1,
            }
        },
        "required": ["m"],
    },
    {
        "type": "object",
        "properties": {
            "ipv6": {"type": "string", "format": "ipv6"},
            "t": {"type": "string", "format": "time"},
            "dt": {"type": "string", "format": "date"},
            "du": {"type": "string", "format": "duration"},
            "h": {"type": "string", "format": "hostname"},
            "ur": {"type": "string", "format": "uri"},
        },
        "required": ["ipv6", "t", "dt", "du", "h", "ur"],
    },
    {
        "type": "object",
        "$defs": {"s": {"type": "string", "pattern": "^[a-z]+$"}},
        "properties": {"l": {"type": "array", "items": {"$ref": "#/$defs/s"}, "minItems": 2, "maxItems": 5}},
        "required": ["l"],
    },
    {"type": "object", "properties": {"x": {"type": "number", "multipleOf": 0.5, "minimum": 12.25}}, "required": ["x"]},
]
