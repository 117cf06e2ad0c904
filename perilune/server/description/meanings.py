"""What each declared field of a request asks for, in one sentence, and the form of the objects that are checked by hand.

A key is a field's name, or BODY.name where a body means something else by it. A test holds the table against the bodies:
every declared field has an entry, and no entry is left over.
"""

from collections.abc import Mapping
from typing import Any

from perilune.core.sampling import MAX_LOGPROBS, MAX_STOPS
from perilune.server.openai.protocol import MAX_DEADLINE_SECONDS, MAX_PRIORITIES, MAX_SALT_CHARS

_ECHO = "a text about the request that the answer repeats"
MEANINGS: Mapping[str, str] = {
    "model": "the served model's name; left out: the one that is served",
    # chat
    "messages": "the conversation, its last message last; one of the assistant's there is the beginning of the answer",
    "tools": "functions that the model may call and the client runs; arguments keep to their schemas",
    "tool_choice": '"auto", "none", "required" or the one function that has to be called',
    "parallel_tool_calls": "false: at most one call in an answer",
    "functions": "refused: send tools",
    "function_call": "refused: send tool_choice",
    "echo": "the answer begins with the text that it continues",
    "CompletionBody.echo": "the answer begins with the prompt",
    "max_tokens": "tokens of the answer at most, thoughts included; left out: what the context holds",
    "CompletionBody.max_tokens": "tokens of the answer at most; default 16",
    "max_completion_tokens": "the newer name of max_tokens",
    "thinking": "switches thinking on or off and bounds it",
    "Thinking.type": "enabled or disabled",
    "keep": '"all": thoughts of earlier turns stay in the prompt',
    "budget_tokens": "tokens that the thought may take",
    "max_thinking_tokens": "tokens that the thought may take",
    "thinking_token_budget": "vLLM's name of max_thinking_tokens; -1: no bound",
    "include_reasoning": "false: the thought is left out of the answer",
    "reasoning_effort": 'bounds the thought: "minimal" 512, "low" 2,048, "medium" 8,192 tokens; "none": no thought',
    "chat_template_kwargs": "vLLM's place of thinking",
    "TemplateKwargs.thinking": "true or false: whether the model thinks",
    "preserve_thinking": "thoughts of earlier turns stay in the prompt",
    "add_generation_prompt": "true: a new message is asked for even if the last one is the assistant's",
    "continue_final_message": "true: the last message is the beginning of the answer",
    "logprobs": "true: log-probabilities of the answer's tokens",
    "top_logprobs": f"likeliest tokens to report at each place, 0 to {MAX_LOGPROBS}",
    # sampling
    "temperature": "0: always the likeliest token; default: what the model recommends",
    "top_p": "sample from the likeliest tokens of this probability together, above 0 to 1",
    "top_k": "sample from so many of the likeliest tokens; 0 or -1: all",
    "min_p": "drop tokens less likely than this share of the likeliest, 0 to 1",
    "seed": "the same seed gives the same answer",
    "stop": f"up to {MAX_STOPS} texts that end the answer and are no part of it",
    "stop_token_ids": "token ids that end the answer",
    "ignore_eos": "true: go on behind the model's own end",
    "n": "answers to the prompt",
    "best_of": "answers made, of which the n likeliest are sent",
    "stream": "true: the answer comes as server-sent events while it is made",
    "stream_options": "what a stream has besides the answer",
    "include_usage": "a last event has the usage",
    "continuous_usage_stats": "every event has the usage so far",
    "include_obfuscation": "no effect: events are not padded",
    "frequency_penalty": "-2 to 2: less of tokens the more often they came",
    "presence_penalty": "-2 to 2: less of tokens that came",
    "repetition_penalty": "0.01 to 10: above 1 less of tokens of prompt and answer",
    "logit_bias": "token id to -100 to 100: makes tokens likelier or less likely",
    "allowed_token_ids": "the only tokens that are sampled",
    "bad_words": "texts that do not come",
    "min_tokens": "tokens before which the answer does not end",
    "prompt_logprobs": f"log-probabilities of the prompt's tokens, with so many of the likeliest, 0 to {MAX_LOGPROBS}",
    "truncate_prompt_tokens": "tokens of the prompt that are kept; -1: as many as the context holds",
    "truncation_side": "the side on which a prompt is cut",
    "include_stop_str_in_output": "the text includes what stopped it",
    "skip_special_tokens": "false: special tokens are part of the text",
    "return_token_ids": "the answer has the ids of its tokens and the prompt's",
    "return_tokens_as_token_ids": "log-probabilities name tokens token_id:N",
    "request_id": "becomes part of the answer's id",
    "cache_salt": f"1 to {MAX_SALT_CHARS} characters: only requests with the same one share cached KV",
    "priority": f"0 to {MAX_PRIORITIES}: larger numbers are admitted later",
    "deadline_seconds": f"up to {MAX_DEADLINE_SECONDS:,}: an answer that is not complete by then ends with status 504",
    "response_format": "the answer's form: JSON, or JSON by a schema",
    "guided_json": "a JSON schema for the answer",
    "guided_regex": "a regular expression for the whole answer",
    "guided_choice": "texts, one of which is the answer",
    "guided_grammar": "a grammar (Lark or GBNF) for the answer",
    "structured_outputs": "one object in place of the guided fields: json, regex, choice, grammar or json_object",
    # completions and tokens
    "prompt": "text or token ids, or a list of such; the model continues each",
    "TokenizeBody.prompt": "the text to tokenize; or send messages",
    "CompletionBody.logprobs": f"log-probabilities, with so many of the likeliest tokens, 0 to {MAX_LOGPROBS}",
    "suffix": "refused: text behind the answer is not supported",
    "add_special_tokens": "no effect: no prompt of this family begins with a token of its own",
    "return_token_strs": "the answer has the text of each token",
    "tokens": "token ids",
    # responses
    "input": "a text, or a list of items: messages, reasoning, calls and their outputs",
    "instructions": "a system message for this request alone",
    "previous_response_id": "a stored response that this request continues",
    "store": "false: the response is not kept",
    "background": "true: answered at once, with status queued; poll, or cancel, the response by its id",
    "text": "the form of the answer's text",
    "format": "text, json_object or json_schema",
    "reasoning": "how much the model thinks",
    "effort": "bounds the thought",
    "summary": "no effect: the whole thought is returned",
    "max_output_tokens": "tokens of the answer at most, thoughts included",
    "include": "reasoning.encrypted_content has no effect; all else is refused",
    "truncation": 'only "disabled": a prompt that does not fit is refused',
    "metadata": _ECHO,
    "user": _ECHO,
    "max_tool_calls": "no effect: it counts tools that the server runs, of which there are none",
    "conversation": "refused: send previous_response_id",
    "ResponsesBody.prompt": "refused: send instructions and input",
    "ResponsesBody.top_logprobs": "refused: /v1/chat/completions has it",
    # messages
    "system": "a text, or text blocks, ahead of the messages",
    "MessagesThinking.type": "enabled needs budget_tokens; adaptive leaves the amount to the model",
    "output_config": "effort, and the form of the answer",
    "OutputConfig.format": "JSON by a schema",
    "output_format": "the older place of output_config.format",
    "stop_sequences": "texts that end the answer and are no part of it",
    "ToolChoice.type": '"auto", "any", "none" or "tool", which name names',
    "name": "the tool that has to be called",
    "disable_parallel_tool_use": "true: at most one call in an answer",
}

_TEXT_OR_PARTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}
_NULL = {"type": "null"}
_SCHEMA = {"type": "object", "description": "a JSON schema"}
_FUNCTION = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"},
        "description": {"type": ["string", "null"]},
        "parameters": {"anyOf": [_SCHEMA, _NULL]},
        "strict": {"type": ["boolean", "null"]},
    },
    "required": ["name"],
}
_CHAT_MESSAGES = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "role": {"type": "string", "examples": ["system", "user", "assistant", "tool"]},
            "content": {"anyOf": [*_TEXT_OR_PARTS["anyOf"], _NULL]},
            "tool_calls": {"type": ["array", "null"], "description": "of the assistant's"},
            "tool_call_id": {"type": ["string", "null"], "description": "of a tool's: the call that it answers"},
            "reasoning_content": {"type": ["string", "null"], "description": "the assistant's thought"},
        },
        "required": ["role"],
    },
}
_CHAT_TOOLS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"type": {"const": "function"}, "function": _FUNCTION},
        "required": ["type", "function"],
    },
}
_TOKEN_IDS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
_STRINGS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, _NULL]}
# JSON schemas where a body's own type says less: BODY.name, or a name of every body.
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "stop": _STRINGS,
    "bad_words": _STRINGS,
    "ChatBody.messages": {**_CHAT_MESSAGES, "minItems": 1},
    "ChatBody.tools": {"anyOf": [_CHAT_TOOLS, _NULL]},
    "TokenizeBody.messages": {"anyOf": [_CHAT_MESSAGES, _NULL]},
    "TokenizeBody.tools": {"anyOf": [_CHAT_TOOLS, _NULL]},
    "CompletionBody.prompt": {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"type": "string"}, "minItems": 1},
            _TOKEN_IDS,
            {"type": "array", "items": _TOKEN_IDS, "minItems": 1},
        ]
    },
    "functions": _NULL,
    "function_call": _NULL,
    "ResponsesBody.input": {
        "anyOf": [
            {"type": "string", "minLength": 1},
            {"type": "array", "items": {"type": "object"}, "minItems": 1},
        ]
    },
    "conversation": _NULL,
    "ResponsesBody.prompt": _NULL,
    "CountBody.messages": {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {"role": {"enum": ["user", "assistant", "system"]}, "content": _TEXT_OR_PARTS},
            "required": ["role", "content"],
        },
        "minItems": 1,
    },
    "CountBody.system": {"anyOf": [*_TEXT_OR_PARTS["anyOf"], _NULL]},
}
SHAPES = {**SHAPES, **{f"MessagesBody.{n}": SHAPES[f"CountBody.{n}"] for n in ("messages", "system")}}
