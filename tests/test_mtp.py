"""MTP heads: read from a model's own checkpoint, drafting what a plain forward of their layer gives, losing nothing."""

import json
from dataclasses import dataclass
from itertools import islice

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, modeling_layers

from batches import opened, prefill, prefilled
from drafted import drafts
from graft import Engine, GraftError, SamplingSettings, load
from graft.drafters.drafter import TreeSettings
from graft.drafters.mtp import has_head, load_head
from graft.drafters.mtp.drafter import MtpDrafter
from graft.loading import load_drafter
from graft.model import VerifyOutput
from graft.model.kv_cache import KVCache, KVStore, PagePool
from graft.request.stats import Clock
from graft.tuning.drafters import full_name
from tiny import ARCHITECTURES, byte_tokenizer, tiny_model

PROMPT = [3, 17, 42, 9, 9, 30, 5, 21]
TREE = TreeSettings(depth=2, topk=3, total_token=9)
LAYERS, WIDTH = 3, 32
# Of a whole model's last layer and norms: the names that a checkpoint has for them.
NEXTN = {
    "model.layers.3.": "model.layers.3.",
    "embedding_norm.": "model.layers.3.enorm.",
    "hidden_norm.": "model.layers.3.hnorm.",
    "fc.": "model.layers.3.eh_proj.",
    "norm.": "model.layers.3.shared_head.norm.",
}
QWEN = {
    "model.layers.3.": "mtp.layers.0.",
    "embedding_norm.": "mtp.pre_fc_norm_embedding.",
    "hidden_norm.": "mtp.pre_fc_norm_hidden.",
    "fc.": "mtp.fc.",
    "norm.": "mtp.norm.",
}
NAMES = ("deepseek_v3", "glm4_moe")
LITE = {"first_k_dense_replace": None, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
HYBRID = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
}


@dataclass
class Checkpoint:
    """A model with an MTP layer, in a folder; and the layer in a model of one layer more, with what it has besides."""

    folder: str
    whole: nn.Module
    extra: dict[str, torch.Tensor]

    def model(self):
        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        model.generation_config.eos_token_id = None
        return model.eval()

    def norm(self, values, name):
        """RMS norm by hand; Qwen's weights are offsets from one."""
        weight = self.extra[name] + ("Qwen" in type(self.whole).__name__)
        return values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + 1e-6) * weight

    @torch.no_grad()
    def plain_draft(self, hidden, tokens, path):
        """q after `tokens` and a drafted path: all entries anew at every step, no cache. hidden: [1, n, H] the target's
        states at all tokens but the last."""
        entries, decoder = [*tokens[1:]], self.whole.model
        self.whole.config._attn_implementation = "eager"
        for token in [*path, None]:
            embedded = decoder.embed_tokens(torch.tensor([entries]))
            both = torch.cat([self.norm(embedded, "embedding_norm."), self.norm(hidden, "hidden_norm.")], dim=-1)
            inputs = both @ self.extra["fc."].T
            count = len(entries)
            positions = torch.arange(count)[None]
            output = decoder.layers[LAYERS](
                inputs,
                attention_mask=torch.full((count, count), -torch.inf).triu(1)[None, None],
                position_ids=positions,
                position_embeddings=decoder.rotary_emb(inputs, positions),
            )
            output = self.norm(output, "norm.")
            if token is not None:
                entries.append(token)
                hidden = torch.cat([hidden, output[:, -1:]], dim=1)
        return self.whole.lm_head(output[0, -1]).softmax(-1)


def make_checkpoint(folder, name, names=NEXTN, **changes):
    """Weights of a random model whose last layer is called an MTP layer."""
    whole = tiny_model(name, num_hidden_layers=LAYERS + 1, **changes)
    config = whole.config
    types = {key: value for key in ("layer_types", "mlp_layer_types") if (value := getattr(config, key, None))}
    nn.init.uniform_(whole.model.norm.weight, 0.5, 2.0)  # so that it matters whether hidden states are normed
    config.num_hidden_layers = LAYERS
    for key, value in types.items():
        setattr(config, key, value[:LAYERS])
    whole.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    config.num_hidden_layers = LAYERS + 1
    extra = {part: torch.rand(WIDTH) + 0.5 for part in ("embedding_norm.", "hidden_norm.", "norm.")}
    extra["fc."] = torch.randn(WIDTH, 2 * WIDTH) * 0.3
    file = folder / "model.safetensors"
    tensors = {}
    for key, tensor in load_file(file).items():
        own = key.startswith("model.layers.3.")
        tensors[names["model.layers.3."] + key.removeprefix("model.layers.3.") if own else key] = tensor
    tensors |= {names[part] + "weight": tensor for part, tensor in extra.items()}
    if names is NEXTN:  # as published: copies of what is the target's
        tensors["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.3.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    return Checkpoint(str(folder), whole, extra)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return {name: make_checkpoint(tmp_path_factory.mktemp(name), name) for name in NAMES}


@pytest.fixture(params=NAMES)
def checkpoint(request, checkpoints):
    return checkpoints[request.param]


def drafted_nodes(drafter, state, roots, keep=None):
    """Path and probability of every node of the first row's tree."""
    nodes = [((), 1.0)]
    for level in drafts(drafter, state, roots, keep, count=3):
        columns = (level.tokens[0], level.parents[0], level.probabilities[0])
        for token, parent, q in zip(*(column.tolist() for column in columns), strict=True):
            nodes.append(((*nodes[parent][0], token), q))
    return nodes[1:]


@pytest.mark.parametrize("name", [*NAMES, "glm4_moe_lite"])
def test_every_drafted_node_has_the_probability_that_a_plain_forward_gives_it(name, checkpoints, tmp_path):
    options = {**ARCHITECTURES["deepseek_v3"], **LITE}
    checkpoint = checkpoints.get(name) or make_checkpoint(tmp_path, name, **options)
    model = checkpoint.model()
    drafter = MtpDrafter(load_head(model), TREE)
    engine = Engine(model, policy="dense", drafter=drafter)
    sequences = [s for p in ([5, 6], PROMPT) for s in engine.new_sequences(p, SamplingSettings(max_new_tokens=12))]
    for _ in islice(engine.rounds(sequences), 4):
        pass
    tokens = sequences[1].ids
    batch = prefilled(engine, tokens, max_new_tokens=4)
    hidden = model.model(torch.tensor([tokens[:-1]])).last_hidden_state
    for keep, count in ((None, 3 + 2 * 9), (1, 3)):
        nodes = drafted_nodes(drafter, batch.draft, batch.roots(), keep)
        assert len(nodes) == count
        for path, q in nodes:
            assert q == pytest.approx(float(checkpoint.plain_draft(hidden, tokens, path[:-1])[path[-1]]), rel=1e-3)


def test_after_rounds_the_head_drafts_what_it_drafts_of_the_text_read_anew(checkpoint):
    model = checkpoint.model()
    drafter = MtpDrafter(load_head(model), TreeSettings(depth=2, topk=8, total_token=30))
    engine = Engine(model, policy="dense", drafter=drafter)
    settings = SamplingSettings(max_new_tokens=40)
    sequences = [s for p in (PROMPT, [5, 6], PROMPT * 2) for s in engine.new_sequences(p, settings)]
    batch = opened(engine, sequences)
    prefill(engine, batch)
    for _ in range(12):
        engine.run_round(batch, Clock())
    assert sum(s.stats.accepted for s in sequences) > 0
    old = drafts(drafter, batch.draft, batch.roots(), count=1)[0]
    for row, sequence in enumerate(sequences):
        fresh = opened(engine, engine.new_sequences(sequence.ids, settings))
        prefill(engine, fresh)
        new = drafts(drafter, fresh.draft, fresh.roots(), count=1)[0]
        torch.testing.assert_close(old.probabilities[row], new.probabilities[0], atol=1e-4, rtol=1e-3)


def test_transformers_own_mtp_drafts_the_same_first_token(checkpoint):
    """An outside reader of the same files."""
    if not hasattr(modeling_layers, "MtpModel"):
        pytest.skip("this version of transformers has none")
    from transformers.cache_utils import MtpCache

    model = checkpoint.model()
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.3\."]  # published models have more layers
    theirs = modeling_layers.MtpModel.from_pretrained(model)
    with torch.no_grad():
        _, logits, _ = theirs(
            input_ids=torch.tensor([PROMPT[1:]]),
            last_hidden_states=model.model(torch.tensor([PROMPT[:-1]])).last_hidden_state,
            attention_mask=None,
            position_ids=torch.arange(1, len(PROMPT))[None],
            mtp_cache=MtpCache(config=model.config.get_mtp_config()),
        )
    drafter = MtpDrafter(load_head(model), TREE)
    engine = Engine(model, policy="dense", drafter=drafter)
    batch = prefilled(engine, PROMPT, max_new_tokens=4)
    level = drafts(drafter, batch.draft, batch.roots(), count=1)[0]
    expected = logits[0, -1].softmax(-1)[level.tokens[0]]
    torch.testing.assert_close(level.probabilities[0], expected, atol=1e-5, rtol=1e-4)


def test_text_with_an_mtp_head_is_that_of_plain_decoding_and_of_transformers(checkpoint):
    prompts, count = [PROMPT, [5]], 8
    off = load(checkpoint.folder, draft=None, policy="off")
    model, drafted = off.target.model, 0
    for policy in ("dense", "graft"):
        engine = load(checkpoint.folder, draft="mtp", policy=policy, budget=12)
        assert isinstance(engine.drafter, MtpDrafter)
        for options in ({}, {"temperature": 1.2, "top_p": 0.9, "seed": 3}):
            options |= {"max_new_tokens": count, "ignore_eos": True}
            found = engine.generate_batch(prompts, **options)
            assert [g.ids for g in found] == [g.ids for g in off.generate_batch(prompts, **options)]
            drafted += sum(g.stats.accepted_by_source.get("drafted", 0) for g in found)
            if "seed" in options:
                several = [each.generate(PROMPT, n=2, **options).choices for each in (engine, off)]
                assert [c.ids for c in several[0]] == [c.ids for c in several[1]]
                continue
            for prompt, generation in zip(prompts, found, strict=True):
                ids = torch.tensor([prompt])
                expected = model.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=None)
                assert generation.ids == expected[0, len(prompt) :].tolist()
    assert drafted > 0


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text"])
def test_a_hybrid_models_head_drafts_what_a_plain_forward_gives(name, tmp_path):
    """Such a model cannot be a target yet, but its MTP layer is of full attention."""
    checkpoint = make_checkpoint(tmp_path, name, QWEN, **HYBRID)
    model = checkpoint.model()
    with pytest.raises(GraftError, match="linear_attention"):
        Engine(model)
    drafter = MtpDrafter(load_head(model), TREE)
    with torch.no_grad():
        hidden = model.model(torch.tensor([PROMPT[:-1]])).last_hidden_state
    pool = PagePool(model.device, None)
    state = drafter.open(KVCache(pool, KVStore(1), [pool.open_row(64)]))
    for start, end in ((0, 4), (4, 7)):
        index = torch.arange(end - start)[None]
        read = VerifyOutput(torch.tensor([PROMPT[start:end]]), index, [end - start], hidden[0], hidden[0, start:end])
        drafter.read([(state, 0, read, PROMPT[start + 1 : end + 1])])
    for path, q in drafted_nodes(drafter, state, torch.tensor(PROMPT[-1:])):
        assert q == pytest.approx(float(checkpoint.plain_draft(hidden, PROMPT, path[:-1])[path[-1]]), rel=1e-3)


LAYER = "model.layers.3."
EXPERT = LAYER + "mlp.experts.2.up_proj.weight"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (LAYER + "eh_proj.weight", None, r"has no tensor model\.layers\.3\.eh_proj\.weight, expected as \[32, 64\]"),
        (LAYER + "shared_head.norm.weight", None, r"has no tensor model\.layers\.3\.shared_head\.norm\.weight"),
        (LAYER + "self_attn.o_proj.weight", None, r"has no tensor model\.layers\.3\.self_attn\.o_proj\.weight"),
        (EXPERT, None, r"has no tensor model\.layers\.3\.mlp\.experts\.2\.up_proj\.weight"),
        (LAYER + "enorm.weight", torch.ones(7), r"enorm\.weight is \[7\], expected as \[32\]"),
        (LAYER + "self_attn.o_proj.weight", torch.ones(7, 5), r"o_proj\.weight is \[7, 5\], expected as \[32, 32\]"),
        (EXPERT, torch.ones(7, 5), r"experts\.2\.up_proj\.weight is \[7, 5\], and other experts' are \[16, 32\]"),
        (LAYER + "surprise.weight", torch.ones(2), r"has a tensor model\.layers\.3\.surprise\.weight, which is not"),
        (LAYER + "hnorm.weight", torch.full((WIDTH,), torch.nan), r"hnorm\.weight has values that are not finite"),
        (
            LAYER + "self_attn.o_proj.weight",
            torch.ones(32, 32).to(torch.float8_e4m3fn),
            r"MTP weights are quantised \(model\.layers\.3\.self_attn\.o_proj\.weight is float8_e4m3fn\): use a copy",
        ),
    ],
)
def test_wrong_mtp_weights_are_named_in_one_line(name, change, message, checkpoints, tmp_path):
    model = checkpoints["glm4_moe"].model()
    tensors = load_file(f"{checkpoints['glm4_moe'].folder}/model.safetensors")
    tensors.pop(name, None)
    save_file(tensors | ({name: change} if change is not None else {}), tmp_path / "model.safetensors")
    model.name_or_path = str(tmp_path)
    with pytest.raises(GraftError, match=message) as raised:
        load_drafter("mtp", model)
    assert "\n" not in str(raised.value) and str(tmp_path) in str(raised.value)


@pytest.mark.parametrize("side", [16, 24])
def test_weights_in_8_bits_are_multiplied_by_the_scales_of_their_blocks(side, checkpoints, tmp_path):
    """As transformers unpacks the target's own; of blocks at the end a part may be missing."""
    model = checkpoints["glm4_moe"].model()
    tensors = load_file(f"{checkpoints['glm4_moe'].folder}/model.safetensors")
    name = LAYER + "self_attn.o_proj.weight"
    small, scales = tensors[name].to(torch.float8_e4m3fn), torch.rand(2, 2) + 0.5
    save_file(tensors | {name: small, name + "_scale_inv": scales}, tmp_path / "model.safetensors")
    quantised = {"quant_method": "fp8", "weight_block_size": [side, side]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantised}))
    model.name_or_path = str(tmp_path)
    found = load_drafter("mtp", model).head.block.model.layers[0].self_attn.o_proj.weight
    expected = small.float().numpy() * np.kron(scales.numpy(), np.ones((side, side), np.float32))[:32, :32]
    np.testing.assert_array_equal(found.detach().numpy(), expected)
    save_file(tensors | {name: small, name + "_scale_inv": scales[:1]}, tmp_path / "model.safetensors")
    with pytest.raises(
        GraftError, match=r"o_proj\.weight is torch\.float8_e4m3fn \[32, 32\], and its scales are .*\[1, 2\]"
    ):
        load_drafter("mtp", model)


def test_the_layer_is_found_by_the_index_of_many_files_and_later_layers_are_left(checkpoints, tmp_path):
    whole = checkpoints["glm4_moe"]
    tensors = load_file(f"{whole.folder}/model.safetensors")
    tensors |= {name.replace(LAYER, "model.layers.4."): 2 * t for name, t in tensors.items() if name.startswith(LAYER)}
    parts = {name: f"model-{'mtp' if LAYER in name else 'main'}.safetensors" for name in tensors}
    for part in set(parts.values()):
        some = {name: tensor for name, tensor in tensors.items() if parts[name] == part}
        save_file(some, tmp_path / part, metadata={"format": "pt"})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": parts}))
    model = whole.model()
    expected = load_head(model).state_dict()
    model.name_or_path = str(tmp_path)
    found = load_head(model).state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    index.write_text("[]")
    assert not has_head(model)
    with pytest.raises(GraftError, match="does not say which file a tensor is in"):
        load_head(model)


def test_a_model_without_mtp_weights_says_so(model_folder, tmp_path):
    with pytest.raises(GraftError, match=r"has no MTP weights .*model\.layers\.3\.\* or mtp\.\*.*another drafter"):
        load(model_folder, draft="mtp")
    model = tiny_model()
    assert not has_head(model)
    with pytest.raises(GraftError, match="this model has none: load it by name"):
        load(model, draft="mtp")


def test_drafters_lists_the_head_of_a_checkpoint(checkpoints, graft, model_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("GRAFT_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    assert "the MTP head in its checkpoint" in graft("drafters", checkpoints["glm4_moe"].folder).out
    assert "MTP" not in graft("drafters", model_folder).out
    (tmp_path / "mtp").mkdir()
    monkeypatch.chdir(tmp_path)
    assert full_name("mtp") == "mtp", "it is no folder's name"
