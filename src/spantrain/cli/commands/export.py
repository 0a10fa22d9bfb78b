"""`spantrain export` and `spantrain import`: weights for others, and weights of others."""

from pathlib import Path
from typing import Annotated

import typer

from spantrain.cli.options import (
    Data,
    Functions,
    Json,
    SequenceLength,
    Tokenizer,
    chosen_functions,
    chosen_model,
    print_json,
)
from spantrain.config.files.json_codec import to_json
from spantrain.config.files.text_files import check_can_make
from spantrain.errors import ConfigError


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, with a checkpoint.")],
    to: Annotated[Path, typer.Option("--to", help="Folder to write; new or empty.")],
    function: Functions = None,
    json_: Json = False,
) -> None:
    """Write the weights of a run's newest checkpoint to a folder that the transformers library loads."""
    check_can_make(to, "--to")
    from spantrain.app.export.export import export_run

    outcome = export_run(run, to, functions=chosen_functions(function))
    if json_:
        print_json(to_json(outcome))
        return
    typer.echo(f"{outcome.model} after {outcome.steps} steps: {outcome.parameters} parameters in {outcome.folder}")
    typer.echo(f"Load it with {outcome.loads_with}; compare with: python examples/load_exported.py {outcome.folder}")
    if outcome.untrained:
        typer.echo(f"Not trained, since the model does not use them: {', '.join(outcome.untrained)}")


def import_(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Weights as *.safetensors, with the model's names.")],
    model: Annotated[str, typer.Option(help="The model, e.g. gpt2-tiny, hf:FOLDER or FILE.py:FUNCTION.")],
    out: Annotated[Path, typer.Option("--out", help="Folder of a new run.")],
    data: Data = None,
    tokenizer: Tokenizer = None,
    sequence_length: SequenceLength = None,
    json_: Json = False,
) -> None:
    """Make a checkpoint at step 0 of weights; go on with: spantrain train --resume RUN --plan PLAN."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder; name one with *.safetensors")
    check_can_make(out, "--out")
    spec = chosen_model(model, data=data, tokenizer=tokenizer, sequence_length=sequence_length)
    from spantrain.app.export.export import import_weights

    outcome = import_weights(folder, spec, out)
    if json_:
        print_json(to_json(outcome))
        return
    typer.echo(f"{outcome.model}: {outcome.parameters} parameters in {outcome.checkpoint}")
    if outcome.converted:
        typer.echo(f"{len(outcome.converted)} of them were of a shorter type and are float32 now, exactly.")
    if outcome.ignored:
        shown = ", ".join(outcome.ignored[:5]) + (", ..." if len(outcome.ignored) > 5 else "")
        typer.echo(f"Not used: {shown}")
    typer.echo(f"Go on with: spantrain train --resume {outcome.run} --plan PLAN --steps N")
