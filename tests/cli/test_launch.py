"""`spantrain launch`: what is refused, before anything is started."""

import pytest

TRAIN = ("--", "train", "plan.json")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--ssh", "--", "plan", "x"), ("give `-- train ...` or `-- profile ...`", "['plan']")),
        (TRAIN, ("give one of --ssh, --docker, --slurm, --kubernetes, --ray, --skypilot; 0 are given",)),
        (("--ssh", "--slurm", *TRAIN), ("2 are given",)),
        (("--kubernetes", *TRAIN), ("--kubernetes: give --image IMAGE",)),
        (("--slurm", "--image", "x", *TRAIN), ("--image: --slurm uses no container",)),
        (("--slurm", "--restarts", "2", *TRAIN), ("--restarts: goes with --ssh, --docker and --ray",)),
        (("--ssh", "--dry-run", *TRAIN), ("--dry-run: --ssh writes no files",)),
        (("--slurm", "--dry-run", "--", "profile", "--out", "x"), ("--dry-run: goes with `train`",)),
        (("--ssh", "--env", "A", *TRAIN), ("--env A: write NAME=VALUE, or HOST:NAME=VALUE",)),
        (("--ssh", "--option", "-o 'x", *TRAIN), ("--option -o 'x: No closing quotation",)),
        (("--ssh", "--code", "nowhere", *TRAIN), ("--code nowhere: is no folder and no wheel",)),
        (("--ssh", "--relay", "home=nowhere", *TRAIN), ("--relay: ", "nowhere")),
        (("--ssh", "--relay", "10.0.0.1:9000", *TRAIN), ("--relay: give the relay's token in SPANTRAIN_RELAY_TOKEN",)),
        (("--ssh", "--relay", "10.0.0.1:9000", *TRAIN, "--insecure"), ("--relay: takes only what is encrypted",)),
        (("--ssh", *TRAIN), ("plan.json: there is no such file",)),
    ],
)
def test_what_does_not_go_together_is_refused(refused, words, says):
    refused("launch", *words, says=says)
