"""The benchmark of large models' layers counts the models that it names."""

import pytest

pytest.importorskip("transformers", reason="needs transformers: pip install 'forgetless[llm]'")

from benchmarks import layers


@pytest.mark.parametrize(
    ("name", "published"),
    [("1B", 1_235_814_400), ("8B", 8_030_261_248)],
)
def test_every_weight_of_a_model_is_in_one_kind_of_layer(name, published):
    model = layers.llama(name, 1, "meta")
    assert sum(p.numel() for p in model.parameters()) == published
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    counts = layers.kinds(model)
    assert sum(r * c * count for (r, c, *_), count in counts.items()) == matrices
    own = sum(count for (*_, has_inputs), count in counts.items() if has_inputs)
    depth = layers.MODELS[name][2]
    # Of q, k, v one has the inputs, and of gate and up one; the output layer may be the embedding.
    assert own == 4 * depth + (1 if name != "8B" else 2)


def test_the_sums_are_over_all_layers():
    found = layers.table("8B", 64, 256, "cpu", 1)
    assert found["total"]["stored_bytes"] == sum(
        row["layers"] * row["stored_bytes"] for row in found["kinds"]
    )
    assert all(row["moment_s"] > 0 and row["step_s"] > 0 for row in found["kinds"])
