"""The state shared by all endpoints: engine, tokenizer and template, admission of requests."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import Request

from perilune.core.config import ServerConfig
from perilune.core.errors import CheckpointError, RequestError, quoted
from perilune.core.files import exists
from perilune.core.jsonfile import read_object
from perilune.core.messages import EngineInfo
from perilune.core.sampling import SamplingParams
from perilune.media.kinds import reads_video
from perilune.media.limits import Limits
from perilune.server import errors
from perilune.server.body import WHOLE_BYTES, Context, RequestBody, parse
from perilune.server.call import Call, current
from perilune.server.generation import Admission, Engine
from perilune.server.keys import Keyring
from perilune.server.metrics import Metrics
from perilune.server.pictures.reader import PictureReader
from perilune.text import bad_words
from perilune.text.chat import ChatTemplate, NoChatTemplate
from perilune.text.tokenizer import Tokenizer

B = TypeVar("B", bound=RequestBody)
T = TypeVar("T")
JSON = "application/json"
OFFLOAD_BYTES = 16_384  # Input of this size or more is processed on a thread: tokenizing so much takes 1 ms.


@dataclass(frozen=True, slots=True)
class ModelText:
    """Tokenizer, template and sampling defaults of the model. `generation_config`: the checkpoint's sampling defaults.
    `default_max_tokens`: limit of chat answers to requests without one; None: the rest of the context."""

    tokenizer: Tokenizer
    template: ChatTemplate
    generation_config: Mapping[str, float] = field(default_factory=dict)
    default_max_tokens: int | None = None

    def defaults(self, *, thinking: bool | None = None) -> dict[str, float]:
        """Sampling parameters of requests that send none (`sampling_defaults`)."""
        return sampling_defaults(self.generation_config, self.template, thinking=thinking)

    def described(self, info: EngineInfo) -> dict[str, Any]:
        """The model's entry in the list of models: capabilities, and default sampling parameters by thinking
        mode."""
        chat, thinking = not isinstance(self.template, NoChatTemplate), self.template.member.thinking
        modes = {"thinking": True} if thinking != "never" else {}
        modes |= {"instant": False} if thinking != "always" else {}
        can: dict[str, Any] = {"chat": chat, "thinking": thinking, "tools": chat, "structured_output": True}
        can["input"] = ["text"]
        if chat and info.media:
            can["input"] += ["image", "video"] if reads_video() else ["image"]
        defaults = {mode: self.defaults(thinking=on) for mode, on in modes.items()}
        return {"capabilities": can, "sampling_defaults": defaults}

    def context(self, info: EngineInfo) -> Context:
        return Context(info.max_model_len, self.tokenizer.longest_bytes)

    def prepared(self, params: SamplingParams, info: EngineInfo) -> SamplingParams:
        """The parameters as the engine needs them: bad words as token ids. RequestError for unknown ids."""
        params = bad_words.resolved(params, self.tokenizer)
        params.check_ids(info.vocab_size)
        return params


class Service:
    """One served model. Belongs to one event loop.

    The caller that started the engine closes it. `stop` ends every request in flight with a clear error, so that long
    answers do not delay the end of the server.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        config: ServerConfig,
        generation_config: dict[str, float] | None = None,
        limits: Limits | None = None,
    ) -> None:
        """`limits`: picture sizes of a model with vision; None: those of Kimi K2.5."""
        self.engine = engine
        self.text = ModelText(tokenizer, template, generation_config or {}, config.default_max_tokens)
        self.config = config
        self.model = config.served_model_name or engine.info.model
        self.keys = Keyring(config.api_key, config.api_key_file)
        self.metrics = Metrics()
        self.metrics.watch(engine, self.keys, self.model)
        self.admission = Admission(engine, self.metrics, config.max_waiting)
        self.pictures = PictureReader(limits or Limits(), config)
        self.observers: list[Callable[[Call], None]] = []  # called with each request that has ended
        self.stopping = asyncio.Event()
        self._large = asyncio.Semaphore(1)
        self.started = int(time.time())

    @property
    def fingerprint(self) -> dict[str, str]:
        """The field `system_fingerprint` of answers if weights are random; {} for a real model."""
        found = self.engine.info.fingerprint
        return {"system_fingerprint": found} if found else {}

    def drain(self) -> None:
        """Refuses new generations from now on; those in flight go on."""
        self.admission.draining = True

    def stop(self) -> None:
        self.drain()
        self.stopping.set()

    def report(self, call: Call) -> None:
        """Passes a call that has ended to the observers; for background work, which outlives its request."""
        call.ended, call.status = time.perf_counter(), 200 if call.error is None else errors.describe(call.error)[0]
        for observer in self.observers:
            observer(call)

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model:
            raise RequestError(
                f"the model {name[:200]!r} is not served here; this server has {self.model!r}",
                param="model",
                code="model_not_found",
                status=404,
            )

    async def receive(self, request: Request, kind: type[B]) -> tuple[B, int]:
        """The body of a request, validated, and its size in bytes; RequestError for what is wrong with it."""
        declared = request.headers.get("content-type", JSON).partition(";")[0].strip().lower()
        # As strict as OpenAI and vLLM: browsers let pages of any origin send text/plain and forms without a preflight.
        if declared != JSON and not declared.endswith("+json"):
            raise RequestError(
                f"the body is declared as {quoted(declared)}: send JSON with 'Content-Type: {JSON}'",
                code="unsupported_media_type",
                status=415,
            )
        coding = request.headers.get("content-encoding", "identity").lower()
        if coding != "identity":
            raise RequestError(
                f"the body is declared as coded ({quoted(coding)}): send it without Content-Encoding",
                code="unsupported_media_type",
                status=415,
            )
        raw = bytearray()  # one copy: Request.body() would keep the pieces and the joined body
        async for piece in request.stream():
            raw += piece
        size, lenient = len(raw), self.config.lenient_fields
        context = self.text.context(self.engine.info)
        body = await self.offload(size, lambda: parse(kind, raw, lenient=lenient, context=context))
        raw.clear()
        request.scope["body_share"].release()
        self.check_model(body.model)
        current().account.check_model(self.model)
        body.check_supported()
        return body, size

    async def offload(self, size: int, work: Callable[[], T]) -> T:
        """Runs `work` on an input of `size` bytes: from OFFLOAD_BYTES on, on a thread, because it would stall all
        streams of the event loop. From WHOLE_BYTES on, one at a time: each needs several times its bytes of memory."""
        if size < OFFLOAD_BYTES:
            return work()
        if size < WHOLE_BYTES:
            return await asyncio.to_thread(work)
        async with self._large:
            return await asyncio.to_thread(work)


def sampling_defaults(
    generation_config: Mapping[str, float], template: ChatTemplate | None = None, *, thinking: bool | None = None
) -> dict[str, float]:
    """Default sampling parameters: the checkpoint's own, else the vendor's recommendation for the mode.

    `template`: its member's recommendation applies; None: K2.6's. `thinking` None: a raw completion, for which there is
    no recommendation.
    """
    if thinking is None:
        return dict(generation_config)
    temperature, top_p = (template or ChatTemplate()).sampling_defaults(thinking=thinking)
    return {"temperature": temperature, "top_p": top_p, **generation_config}


def read_generation_config(directory: Path) -> dict[str, float]:
    """Sampling defaults of a checkpoint's generation_config.json; empty when the file or the keys are absent.
    Its eos_token_id is only checked: config.json's are used."""
    path = directory / "generation_config.json"
    if not exists(path):
        return {}
    data = read_object(path)
    ends = data.get("eos_token_id", [])
    if ends is not None and any(type(i) is not int for i in (ends if isinstance(ends, list) else [ends])):
        raise CheckpointError(f"{path}: eos_token_id must be a token id or a list of them, not {quoted(ends)}")
    found: dict[str, float] = {}
    for name in ("temperature", "top_p", "top_k", "min_p"):
        value = data.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not -1e30 < value < 1e30:
            raise CheckpointError(f"{path}: {name} must be a number, not {quoted(value)}")
        found[name] = value
    try:
        SamplingParams(**found)  # type: ignore[arg-type]  # numbers; it refuses a top_k with a fraction
    except RequestError as e:
        raise CheckpointError(f"{path}: {e}") from e
    return found
