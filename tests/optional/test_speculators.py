"""Our training against another trainer's, the `speculators` package: the same draft on the same batch.

Not part of the tests that always run: the package cannot share an environment with the rest. In a second one that has
this project and its test requirements:

    pip install --no-deps speculators==0.9.0 hs-connectors
    pip install loguru pydantic-settings datasets psutil protobuf aiohttp typer
    pytest tests/optional
"""

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("speculators", reason="an optional environment: see the module's docstring")

from speculators.losses.eager import (  # type: ignore[import-not-found]
    kl_div_loss,
    lk_hybrid_loss,
    neg_log_acceptance_loss,
    tv_loss,
)
from speculators.models.eagle3 import (  # type: ignore[import-not-found]
    Eagle3DraftModel,
    Eagle3SpeculatorConfig,
)
from transformers import LlamaConfig

from perilune.draft.batch import Batch
from perilune.draft.corpus import Row
from perilune.draft.trainee import Trainee
from perilune.model.eagle3_config import Eagle3Config
from tests.cpu.draft.test_draft_train import a_target, a_trainee, drafts_config, head_of, states_for
from tests.cpu.model.test_eagle3 import D, V

THEIRS = {"kl": kl_div_loss, "tv": tv_loss, "nla": neg_log_acceptance_loss, "hybrid": lk_hybrid_loss}
STEPS = 4
VARIANTS = {
    "plain": {},
    "3.1": {"fc_norm": True, "norm_output": True},
    "shared-keys-residual": {"num_key_value_heads": 1, "norm_before_residual": True},
    "joint-norm": {"norm_before_fc": True},
}


def twin(config: Eagle3Config, trainee: Trainee, embed: Tensor, head: Tensor) -> torch.nn.Module:
    """Their model with the trainee's weights."""
    layer = LlamaConfig(
        hidden_size=D, intermediate_size=config.intermediate_size, num_hidden_layers=1, vocab_size=V,
        num_attention_heads=config.num_attention_heads, num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim, rms_norm_eps=config.rms_norm_eps, max_position_embeddings=512,
        rope_theta=config.rope_theta, attn_implementation="eager",
    )  # fmt: skip
    flags = {
        name: getattr(config, name) for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    }
    theirs = Eagle3DraftModel(
        Eagle3SpeculatorConfig(
            transformer_layer_config=layer, draft_vocab_size=V, eagle_aux_hidden_state_layer_ids=[1, 2, 4], **flags
        )
    )
    ours = {name.replace("midlayer.", "layers.0."): p.detach().clone() for name, p in trainee.named_parameters()}
    fixed = {
        "embed_tokens.weight": embed,
        "lm_head.weight": head,
        "verifier_lm_head.weight": head,
        "verifier_norm.weight": torch.ones(D),
    }
    missing, surplus = theirs.load_state_dict(ours | fixed, strict=False)
    assert not missing and not surplus, (missing, surplus)
    return theirs.float().train()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("loss", THEIRS)
def test_loss_and_gradients_are_theirs(variant: str, loss: str) -> None:
    target = a_target()
    _, config = drafts_config(target[0], "mha", **VARIANTS[variant])
    trainee = a_trainee(target, config)
    embed, head = target[1].embed, head_of(target[1])
    # With a prompt of one token, chains begin at every position, as theirs do.
    g = torch.Generator().manual_seed(7)
    row = Row(tuple(torch.randint(V, (19,), generator=g).tolist()), 1, 0, True)
    n = len(row.ids)
    aux, stream = states_for([row], 5)
    hidden = stream * (stream.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt()  # their verifier's norm
    batch = Batch.of([row], torch.device("cpu"))
    lesson = trainee.lesson(batch, aux, hidden[batch.taught], STEPS, 1.0, loss)
    lesson.loss.backward()  # type: ignore[no-untyped-call]

    theirs = twin(config, trainee, embed, head)
    ids = torch.tensor(row.ids)
    count = n - 2  # features 0 .. n - 3, each with the token after it, guess tokens 2 .. n - 1
    _, total, metrics = theirs(
        hidden_states=aux[None, :count],
        input_ids=ids[None, 1 : count + 1],
        document_ids=torch.zeros(1, count, dtype=torch.long),
        loss_mask=torch.ones(1, count, dtype=torch.bool),
        verifier_last_hidden_states=stream[None, 1 : count + 1],
        ttt_steps=STEPS,
        ttt_step_loss_decay=1.0,
        loss_config={"it": (THEIRS[loss], 1.0)},
    )
    total.backward()
    # They add up what we average; and their KL has the entropy of the target, which is no gradient.
    if loss in ("tv", "nla"):
        assert lesson.loss.item() == pytest.approx(total.item() / STEPS, rel=1e-5)
    if loss == "kl":
        p = (hidden @ head.T).softmax(-1)
        entropies = -(p * p.log()).sum(-1)
        entropy = sum(entropies[1 + j : n - 1].mean().item() for j in range(STEPS))
        assert lesson.loss.item() == pytest.approx((total.item() + entropy) / STEPS, rel=1e-5)
    shares = [
        (metrics[f"full_acc_{j}_sum"] / metrics[f"full_acc_{j}_total"]).item() for j in range(STEPS)
    ]  # of chains that were right so far
    assert lesson.agreement[0].item() == pytest.approx(shares[0], abs=1e-6)
    grads = dict(theirs.named_parameters())
    for name, p in trainee.named_parameters():
        other = grads[name.replace("midlayer.", "layers.0.")].grad
        assert p.grad is not None and other is not None
        worst = float((p.grad * STEPS - other).abs().max())
        assert worst <= 1e-5 * max(1.0, float(other.abs().max())), (name, worst)
        assert math.isfinite(worst) and float(other.abs().max()) > 0, name
