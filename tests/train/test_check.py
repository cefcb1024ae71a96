"""What is wrong is said before anything is computed."""

from pathlib import Path

import pytest
import torch

from harts.cli import main
from harts.errors import InputError
from harts.train.check import check_rollouts, setting_faults
from harts.train.config import TrainConfig
from harts.train.objectives import Grpo, Ppo, Sft
from tests.forests import trie_of
from tests.train.rig import layouts_of

QUICKSTART = str(Path(__file__).resolve().parents[2] / "pipelines" / "quickstart.yaml")
LAYOUTS = layouts_of(trie_of([[1, 2, 3], [1, 2, 9]]), [[0, 1]])


@pytest.mark.parametrize(
    ("objective", "field"),
    [(Ppo(Ppo.Config()), "advantage"), (Grpo(Grpo.Config()), "advantage")],
)
def test_a_missing_column_is_named_with_the_source(objective, field):
    with pytest.raises(InputError, match=f"test: field {field}: the objective needs it"):
        check_rollouts(LAYOUTS, objective, 100)


def test_a_token_outside_the_vocabulary_is_named_with_its_trajectory():
    check_rollouts(LAYOUTS, Sft(Sft.Config()), 10)
    with pytest.raises(InputError, match="test: trajectory 't1', token 2: token id 9 is outside the model's vocabul"):
        check_rollouts(LAYOUTS, Sft(Sft.Config()), 9)


def test_every_conflict_of_settings_is_told():
    config = TrainConfig(learning_rate=0.1, optimizer="sgd", compare="flat")
    restore = type("Restore", (), {"entropy": False})
    objective = Grpo(Grpo.Config(entropy_coefficient=0.1))
    entropy, bound = setting_faults(objective, config, restore, torch.bfloat16)
    assert "needs restore.entropy: true" in entropy
    assert "no parity bound is set for bfloat16; known: float64, float32" in bound
    assert not setting_faults(Sft(Sft.Config()), config, restore, torch.float32)


@pytest.mark.parametrize("command", ["check", "run"])
def test_the_command_line_tells_them_at_load(command, capsys):
    sets = ["--set", "restore.entropy=false", "--set", "train.objective.entropy_coefficient=0.1"]
    assert main([command, QUICKSTART, *sets]) == 2
    assert "train.objective.entropy_coefficient" in capsys.readouterr().err
