"""The model is a Llama: counted exactly, and equal to an independent one, gradients too."""

import dataclasses
import math
import random

import pytest
import torch

from picotron_edu.model import (
    PRESETS,
    Llama,
    LlamaConfig,
    RopeScaling,
    causal_attention,
    init_weight,
    token_loss_sum,
)

PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
}
SMALL = LlamaConfig(
    vocab_size=41,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
SCALED = RopeScaling(factor=4.0, original_max_position_embeddings=16)


@pytest.mark.parametrize("name", PRESETS)
def test_parameter_counts_from_the_formula_and_from_the_built_model_are_the_published_ones(name):
    config = LlamaConfig.from_preset(name)
    built = Llama(config, device="meta")
    assert config.num_parameters() == sum(p.numel() for p in built.parameters())
    assert config.num_parameters() == PUBLISHED.get(name, config.num_parameters())
    assert config.weight_shapes() == {n: tuple(p.shape) for n, p in built.named_parameters()}


def test_the_counts_differ_from_those_of_the_usual_wrong_formulas():
    llama = LlamaConfig.from_preset("llama-3-8b")
    every_head_has_keys = dataclasses.replace(llama, num_key_value_heads=32)
    tied = dataclasses.replace(llama, tie_word_embeddings=True)
    assert every_head_has_keys.num_parameters() == 8_835_567_616
    assert tied.num_parameters() == 7_504_924_672


def test_ten_random_small_configurations_count_right():
    draw = random.Random(0)
    for _ in range(10):
        kv_heads, group = draw.randint(1, 3), draw.randint(1, 3)
        config = LlamaConfig(
            vocab_size=draw.randint(5, 50),
            hidden_size=draw.randint(1, 6) * 2 * kv_heads * group,
            intermediate_size=draw.randint(3, 30),
            num_hidden_layers=draw.randint(1, 3),
            num_attention_heads=kv_heads * group,
            num_key_value_heads=kv_heads,
            head_dim=draw.choice([None, 4, 10]),
            tie_word_embeddings=draw.random() < 0.5,
        )
        assert config.num_parameters() == sum(p.numel() for p in Llama(config).parameters())


@pytest.mark.parametrize("rope_scaling", [None, SCALED], ids=["plain", "llama3"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_logits_and_all_gradients_equal_transformers(tmp_path, tied, rope_scaling):
    transformers = pytest.importorskip("transformers")
    safetensors = pytest.importorskip("safetensors.torch")
    config = dataclasses.replace(SMALL, tie_word_embeddings=tied, rope_scaling=rope_scaling)
    fields = dataclasses.asdict(config)
    if rope_scaling is not None:
        fields["rope_scaling"] = {"rope_type": "llama3", **fields["rope_scaling"]}
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields)).float()
    with torch.no_grad():  # larger weights than at the start, so that every part has its say
        for param in theirs.parameters():
            param.copy_(
                torch.randn(param.shape, generator=torch.Generator().manual_seed(param.numel())) / 3
            )
    theirs.save_pretrained(tmp_path)

    weights = safetensors.load_file(tmp_path / "model.safetensors")
    if tied:  # the file holds a tied weight once
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    ours = Llama(config, seed=5)
    ours.load_state_dict(weights)

    tokens_BS = torch.randint(41, (3, 48), generator=torch.Generator().manual_seed(0))
    labels_BS = tokens_BS.roll(-1, dims=1)
    ours_BSV, theirs_BSV = ours(tokens_BS), theirs(tokens_BS).logits
    torch.testing.assert_close(ours_BSV, theirs_BSV, rtol=1e-5, atol=1e-5)

    for logits_BSV in (ours_BSV, theirs_BSV):
        loss, count = token_loss_sum(logits_BSV, labels_BS)
        (loss / count).backward()
    gradients = {name: param.grad for name, param in theirs.named_parameters()}
    assert gradients.keys() == {name for name, _ in ours.named_parameters()}
    for name, param in ours.named_parameters():
        difference = (param.grad - gradients[name]).abs().max() / gradients[name].abs().max()
        assert difference < 1e-5, (
            f"gradient of {name}: {difference:.1e} off, relative to its largest"
        )


def test_rope_scaling_changes_the_logits():
    tokens_BS = torch.arange(40)[None, :]
    plain, scaled = Llama(SMALL), Llama(dataclasses.replace(SMALL, rope_scaling=SCALED))
    assert not torch.allclose(plain(tokens_BS), scaled(tokens_BS))


def test_a_weight_starts_as_a_function_of_seed_and_name_alone():
    shallow = dataclasses.replace(SMALL, num_hidden_layers=1)
    deep, again, other = Llama(SMALL, seed=3), Llama(shallow, seed=3), Llama(SMALL, seed=4)
    torch.manual_seed(999)  # the global generator plays no part
    for name, param in again.named_parameters():
        assert torch.equal(param, dict(deep.named_parameters())[name])
    q, k = deep.model.layers[0].self_attn.q_proj, deep.model.layers[1].self_attn.q_proj
    assert not torch.equal(q.weight, k.weight)
    assert not torch.equal(q.weight, other.model.layers[0].self_attn.q_proj.weight)
    assert torch.equal(init_weight("a", (64, 64), 0, 0.02), init_weight("a", (64, 64), 0, 0.02))
    assert abs(init_weight("a", (64, 64), 0, 0.02).std().item() - 0.02) < 0.001
    assert (deep.model.norm.weight == 1).all()


def test_the_first_loss_is_that_of_a_uniform_guess():
    config = LlamaConfig.from_preset("tiny")
    tokens_BS = torch.randint(256, (2, 65), generator=torch.Generator().manual_seed(0))
    loss, count = token_loss_sum(Llama(config)(tokens_BS[:, :-1]), tokens_BS[:, 1:])
    assert abs(loss.item() / count.item() - math.log(256)) < 0.1


def test_no_position_sees_a_later_token():
    model = Llama(SMALL, dtype=torch.float64)
    tokens_BS = torch.arange(12)[None, :].clone()
    before = model(tokens_BS)
    tokens_BS[0, 8] = 40
    after = model(tokens_BS)
    assert torch.equal(before[:, :8], after[:, :8])
    assert not torch.equal(before[:, 8:], after[:, 8:])


def test_positions_can_be_given_and_only_distances_matter():
    model = Llama(SMALL, dtype=torch.float64)
    tokens_BS = torch.arange(12)[None, :]
    default, shifted = model(tokens_BS), model(tokens_BS, torch.arange(12) + 5)
    torch.testing.assert_close(default, model(tokens_BS, torch.arange(12)), rtol=0, atol=0)
    torch.testing.assert_close(default, shifted, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(default, model(tokens_BS, torch.arange(12) * 2), atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_grouped_attention_equals_the_same_heads_repeated(dtype):
    draw = torch.Generator().manual_seed(0)
    q_BHSd, k_BKSd, v_BKSd = (torch.randn(2, n, 9, 4, generator=draw).to(dtype) for n in (6, 2, 2))
    repeated = [x.repeat_interleave(3, dim=1) for x in (k_BKSd, v_BKSd)]
    grouped = causal_attention(q_BHSd, k_BKSd, v_BKSd)
    torch.testing.assert_close(grouped, causal_attention(q_BHSd, *repeated))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions_agree_with_float32_and_sum_the_loss_in_float32_or_more(dtype):
    tokens_BS = torch.arange(30)[None, :]
    exact_BSV, other_BSV = Llama(SMALL)(tokens_BS), Llama(SMALL, dtype=dtype)(tokens_BS)
    assert other_BSV.dtype == dtype
    torch.testing.assert_close(other_BSV.float(), exact_BSV, rtol=0.1, atol=0.02)
    loss, _ = token_loss_sum(other_BSV, tokens_BS)
    assert loss.dtype == torch.promote_types(dtype, torch.float32)


def test_masked_labels_are_neither_summed_nor_counted():
    logits_BSV = torch.randn(1, 4, 5, generator=torch.Generator().manual_seed(0))
    labels_BS = torch.tensor([[1, -100, 3, -100]])
    loss, count = token_loss_sum(logits_BSV, labels_BS)
    expected = -logits_BSV.log_softmax(-1)[0, [0, 2], [1, 3]].sum()
    torch.testing.assert_close(loss, expected)
    assert count == 2
    loss, count = token_loss_sum(logits_BSV, torch.full((1, 4), -100))
    assert (loss, count) == (0, 0)  # a sum over nothing is zero, a mean would be NaN


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 5}, r"hidden_size \(24\) .* num_attention_heads \(5\)"),
        ({"num_key_value_heads": 4}, r"num_attention_heads \(6\) .* num_key_value_heads \(4\)"),
        ({"hidden_size": 18}, "must be even for rotary positions, got 3"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1, got 0"),
        ({"head_dim": 0}, "head_dim must be at least 1, got 0"),
        ({"head_dim": -2}, "head_dim must be at least 1, got -2"),
        ({"hidden_size": 16.0}, r"hidden_size must be a whole number, got 16\.0"),
        ({"vocab_size": "5"}, "vocab_size must be a whole number, got '5'"),
        ({"rope_theta": 0}, "rope_theta must be a number above 0 and finite, got 0"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a number 0 or more, and finite, got -1"),
    ],
)
def test_impossible_shapes_are_refused_with_their_numbers(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)


def test_an_unknown_preset_or_field_is_an_error():
    with pytest.raises(ValueError, match=r"'huge' is unknown; there are tiny, llama-2-7b"):
        LlamaConfig.from_preset("huge")
    with pytest.raises(TypeError, match="hidden_sise"):
        LlamaConfig.from_preset("tiny", hidden_sise=3)
