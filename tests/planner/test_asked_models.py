"""Models that are asked about: config.json of Hugging Face's, YAML of one's own, and what is wrong with either."""

import json

import pytest

from synergy_core.__main__ import main
from synergy_core.commands._settings import DEFAULT_TOKENS, model_from_config, model_types, requested_model
from synergy_core.errors import InputError
from synergy_core.performance.planner.families import architecture_named, mixture
from synergy_core.performance.planner.machine import Software
from synergy_core.performance.planner.plan import Plan, plans_of

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
SIZES = {"layers": "4", "hidden": "512", "heads": "8", "ffn": "2048", "vocab": "1000", "seq_len": "512"}
MINE = {"family": "transformer", "title": "Mine", **SIZES, "published_parameters": "1.0e+7", "source": "me"}
PARTS = {"family": "mixture", "experts": "8", "topk": "2", "expert_ffn": "512"}


def config(tmp_path, **changes):
    content = {key: value for key, value in {**LLAMA, **changes}.items() if value is not None}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content))
    return path


def mine(tmp_path, **changes):
    path = tmp_path / "mine.yaml"
    lines = [f"{key}: {value}" for key, value in {**MINE, **changes}.items() if value is not None]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_config_json_is_the_model_of_the_catalog(tmp_path):
    """Meta-Llama-3-8B's own config.json, as far as it is read."""
    _, ours = architecture_named("llama-3-8b")
    assert model_from_config(config(tmp_path)).architecture == ours
    assert requested_model(str(tmp_path)).architecture == ours


CONFIGS = {
    "LlamaConfig": {"num_key_value_heads": 8},
    "MistralConfig": {},
    "MixtralConfig": {},
    "Qwen2Config": {"num_key_value_heads": 4},
    "Qwen3Config": {"num_key_value_heads": 8},
    "Qwen3MoeConfig": {},
    "DeepseekV3Config": {},
    "DeepseekV2Config": {"q_lora_rank": None, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "Gemma2Config": {},
    "Gemma3TextConfig": {},
    "Phi3Config": {},
    "Llama4TextConfig": {},
    "Qwen2VLTextConfig": {"num_key_value_heads": 8},
    "Qwen2_5_VLTextConfig": {"num_key_value_heads": 8},
    "Qwen3VLTextConfig": {},
    "GptOssConfig": {},
    "GPT2Config": {},  # its MLP is four times as wide where nobody says how wide
    "GPTNeoXConfig": {},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_transformers_own_model(tmp_path, name):
    """Counted on the meta device, biases and norms included, which the planner leaves out or rounds."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    theirs = getattr(transformers, name)(**CONFIGS[name])
    theirs.save_pretrained(tmp_path)
    is_part = "VLText" in name  # of a vision-language model, which is loaded without its logits
    with torch.device("meta"):
        model = (transformers.AutoModel if is_part else transformers.AutoModelForCausalLM).from_config(theirs)
    count = sum(each.numel() for each in {id(each): each for each in model.parameters()}.values())
    count += theirs.vocab_size * theirs.hidden_size * (is_part and not getattr(theirs, "tie_word_embeddings", False))
    ours = model_from_config(tmp_path, seq_len=1024).architecture
    assert float(ours.parameters()) == pytest.approx(count, rel=0.004)


def test_every_model_type_is_tried():
    tried = {name.removesuffix("Config").removesuffix("Text").replace("_", "").lower() for name in CONFIGS}
    assert tried == {each.replace("_", "") for each in model_types()}


def test_sequences_are_as_long_as_models_are_trained_on_unless_said(tmp_path):
    path = config(tmp_path, max_position_embeddings=131072)
    found = model_from_config(path)
    assert found.architecture.seq_len == DEFAULT_TOKENS
    assert found.notes == ("sequences of 8,192 tokens (the model reads up to 131,072); seq_len=… sets it",)
    assert model_from_config(path, seq_len=32768).architecture.seq_len == 32768
    assert requested_model("gpt-1.3b", 4096).architecture.seq_len == 4096
    (note,) = model_from_config(config(tmp_path, model_type="mistral", sliding_window=1024), seq_len=2048).notes
    assert note.startswith("attention has a window of 1,024 tokens in 100% of the layers")


LITE = {
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "vocab_size": 102400,
    "max_position_embeddings": 4096,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
}
"""DeepSeek-V2-Lite, of 15.7B parameters (arXiv 2405.04434, appendix B)."""


def test_queries_without_a_latent_are_projected_from_the_layers_input(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LITE))
    a = model_from_config(path).architecture
    assert a.query_rank == 0
    assert float(a.parameters()) == pytest.approx(15.7e9, rel=0.003)
    plans = plans_of([Plan(tensor=2)])
    query, latent, heads, out = mixture.latent_attention_part(a, plans, Software("test"))["gemms"]
    assert [float(each) for each in (query.m[0], query.n[0], query.k)] == [4096, 16 / 2 * (128 + 64), 2048]
    assert [float(each.k) for each in (latent, heads)] == [2048, 512]
    assert float(out.k[0]) == 16 / 2 * 128
    del LITE["q_lora_rank"]
    path.write_text(json.dumps(LITE))
    with pytest.raises(InputError, match="q_lora_rank is missing"):
        model_from_config(path)


def test_a_vision_language_models_language_model_is_planned_and_its_tower_left_out(tmp_path):
    """google/gemma-3-4b-it's own config.json; its language model has 3,880,099,328 parameters (keras-hub's presets)."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1152}}))
    found = model_from_config(path)
    assert float(found.architecture.parameters()) == pytest.approx(3_880_099_328, rel=1e-3)
    assert found.architecture.windowed == pytest.approx(29 / 34)  # each sixth layer sees all keys
    assert any("gemma3" in note and "left out" in note for note in found.notes)
    path.write_text(json.dumps({"model_type": "llava", "text_config": LLAMA, "vision_config": {}}))
    assert model_from_config(path).architecture == architecture_named("llama-3-8b")[1]
    path.write_text(json.dumps({"model_type": "mllama", "text_config": {"model_type": "mllama_text_model"}}))
    with pytest.raises(InputError, match=r"'mllama_text_model'\. Known"):
        model_from_config(path)


def test_windows_are_those_of_the_listed_layers(tmp_path):
    types = ["full_attention"] + ["sliding_attention"] * 31
    path = config(tmp_path, model_type="gemma2", sliding_window=1024, layer_types=types, head_dim=128)
    assert model_from_config(path).architecture.windowed == 31 / 32
    assert model_from_config(path, seq_len=1024).architecture.windowed == 0.0  # no query sees further anyway
    path = config(tmp_path, model_type="gemma3", sliding_window=1024, sliding_window_pattern=4)
    assert model_from_config(path).architecture.windowed == 3 / 4


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "qwen3_next", "linear_key_head_dim": 128}, "linear attention"),
        ({"model_type": "mamba"}, "mamba.*recurrent state"),
        ({"layer_types": ["conv", "full_attention"] * 16}, "conv: .*not modelled"),
        ({"model_type": "minimax_text_01", "attn_type_list": [0, 0, 1]}, "attn_type_list"),
        ({"layer_types": ["linear_attention", "full_attention"] * 16}, "linear_attention"),
        ({"model_type": "kimi_linear", "linear_attn_config": {"num_heads": 3}}, "linear_attn_config"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes.*delete quantization_config"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
    ],
)
def test_layers_and_weights_that_are_not_modelled_are_refused_by_name(tmp_path, changes, says):
    with pytest.raises(InputError, match=says):
        model_from_config(config(tmp_path, **changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "qwen2_audio"}, "'qwen2_audio'. Known"),
        ({"model_type": "lama"}, "unknown model_type in .*'lama'. Known: .*llama"),
        ({"model_type": "bloom"}, "Describe it by hand instead: model=mine.yaml"),
        ({"model_type": None}, "has no model_type"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_hidden_layers": "forty"}, "layers: forty; expected a whole number"),
        ({"num_attention_heads": 41}, "heads: 41 do not divide hidden: 4096"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window: True is not modelled"),
    ],
)
def test_a_config_json_that_is_no_model(tmp_path, changes, says):
    with pytest.raises(InputError, match=says):
        model_from_config(config(tmp_path, **changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layers": "forty"}, "layers: forty; expected a whole number"),
        ({"layers": "-4"}, "layers: -4; expected a whole number of at least 1"),
        ({"layers": ""}, "layers: nothing; expected a whole number"),
        ({"hidden": "1e4"}, "hidden: 1e4 is text to YAML"),
        ({"hidden": None}, "hidden missing"),
        ({"heads": "41"}, "heads: 41 do not divide hidden: 512; give head_width, or heads such as 32"),
        ({"kv_heads": "3"}, "kv_heads: 3 do not divide heads: 8; such as 2"),
        ({"gated": "perhaps"}, "gated: perhaps; expected true or false"),
        ({"family": "transformers"}, "Did you mean 'transformer'"),
        ({"family": None}, "family missing"),
        ({"published_parameters": "many"}, "published_parameters: many; expected a number above 0"),
        ({"layer": "4"}, "Did you mean 'layers'"),
        ({**PARTS, "topk": "9"}, "topk: 9 of experts: 8"),
        ({**PARTS, "dense_layers": "5"}, "dense_layers: 5 of layers: 4"),
        ({**PARTS, "windowed": "1.5", "window": "8"}, "windowed: 1.5 with window: 8"),
        ({**PARTS, "key_value_rank": "64"}, "rotary_width: 0; expected a whole number of at least 1"),
    ],
)
def test_a_malformed_architecture_is_one_sentence(tmp_path, capsys, changes, says):
    assert main(["plan", f"model={mine(tmp_path, **changes)}", "gpu=a100", "gpus=2", "batch=8"]) == 2
    told = capsys.readouterr().err
    assert says in told
    assert len(told.splitlines()) == 1


def test_a_model_of_ones_own_is_planned(tmp_path):
    assert main(["plan", f"model={mine(tmp_path)}", "gpu=a100", "gpus=2", "batch=8"]) == 0


@pytest.mark.parametrize(
    ("name", "guess"),
    [("gemma-2-9b", None), ("mistral-7b", None), ("llama3-8b", "llama-3-8b"), ("lama-3-8b", "llama-3-8b")],
)
def test_a_guess_at_a_model_is_of_its_family(name, guess):
    with pytest.raises(InputError, match=r"FOLDER/config\.json") as error:
        requested_model(name)
    assert (f"Did you mean '{guess}'" in str(error.value)) if guess else ("Did you mean" not in str(error.value))


def test_nothing_is_fetched():
    with pytest.raises(InputError, match=r"nothing is downloaded\. .* model=FOLDER/config.json"):
        requested_model("meta-llama/Meta-Llama-3-8B")
    with pytest.raises(InputError, match="resnet-50 does not read sequences"):
        requested_model("resnet-50", 2048)
