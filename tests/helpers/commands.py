"""Commands as pages and scripts write them: do they exist, with these options?"""

import shlex

from typer.main import get_command

from anyfleet.cli.app import app


def unknown_in(line: str) -> list[str]:
    """Return the words of a command `anyfleet …` that the command line does not know."""
    program, *words = shlex.split(line)
    assert program == "anyfleet"
    command = get_command(app)
    path: list[str] = []
    while words and hasattr(command, "commands"):
        if words[0] not in command.commands:
            return [*path, words[0]]
        path.append(words.pop(0))
        command = command.commands[path[-1]]
    known = {option for each in command.params for option in each.opts} | {"--help"}
    needed = [each for each in command.params if each.required and each.param_type_name != "option"]
    plain = [word for word in words if not word.startswith("--")]
    few = ["too few arguments"] if len(plain) < len(needed) else []
    return [word for word in words if word.startswith("--") and word not in known] + few
