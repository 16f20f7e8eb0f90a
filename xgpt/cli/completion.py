"""`xgpt completion`: what makes a shell complete commands, options, job files and keys."""

import os

import click
from click.shell_completion import get_completion_class

_PLACES = {"bash": "~/.bashrc", "zsh": "~/.zshrc", "fish": "~/.config/fish/config.fish"}


@click.command()
@click.argument("shell", type=click.Choice(tuple(_PLACES)), default=lambda: _own_shell())
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print what completes xgpt's commands in your shell, for its start-up file.

    \b
    bash   echo 'eval "$(xgpt completion bash)"' >> ~/.bashrc
    zsh    echo 'eval "$(xgpt completion zsh)"' >> ~/.zshrc
    fish   echo 'xgpt completion fish | source' >> ~/.config/fish/config.fish
    """
    made = get_completion_class(shell)
    assert made is not None, f"{shell = }"
    click.echo(made(context.find_root().command, {}, "xgpt", "_XGPT_COMPLETE").source())


def _own_shell() -> str:
    """The shell that the user has by default."""
    name = os.path.basename(os.environ.get("SHELL", ""))
    return name if name in _PLACES else "bash"
