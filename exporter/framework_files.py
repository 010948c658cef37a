"""Write what follows from the frameworks' declarations into the files that cannot import them.

These are the agent's start-up file, which runs before our modules can be imported, and the JSON schema of the
ledger. A test fails if one of them differs from what this writes.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from vramledger.agent_protocol.frameworks import POOL_FIGURES, REPORTING_FRAMEWORKS
from vramledger.agent_protocol.messages import ALLOCATOR_SETTINGS, CATEGORIES, CONSENTS, OOM_VERDICTS

_SETTINGS = tuple(ALLOCATOR_SETTINGS.items())
PACKAGE = Path(__file__).parent / "vramledger"
STARTUP = PACKAGE / "agent" / "startup" / "sitecustomize.py"
SCHEMA = PACKAGE / "web" / "schemas" / "ledger.json"

_WRITTEN = re.compile(r"(?<=/frameworks\.py\.\n).*?(?=# End of what is written\.)", re.DOTALL)


def startup(text: str) -> str:
    """Return the start-up file with the modules that it must wait for."""
    modules = [framework.imported_module for framework in REPORTING_FRAMEWORKS.values()]
    lines = [f'    "{module}",\n' for module in modules]
    written, times = _WRITTEN.subn(f"IMPORTED_MODULES = (\n{''.join(lines)})\n", text)
    if times != 1:
        sys.exit(f"{STARTUP} must have one place between '/frameworks.py.' and '# End of what is written.'")
    return written


def schema(text: str) -> str:
    """Return the schema with the frameworks that may report, their figures, and the protocol's words."""
    document = json.loads(text)
    device = document["properties"]["devices"]["items"]["properties"]
    agent = device["holdings"]["items"]["properties"]["agent"]["properties"]
    agent["consents"]["items"]["enum"] = list(CONSENTS)
    agent["last_oom"]["properties"]["verdict"]["enum"] = list(OOM_VERDICTS)
    agent["frameworks"]["items"] = _framework()
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _framework() -> dict[str, Any]:
    categories = {
        name: {"type": "integer", "description": f"Bytes of live tensors: {name}."} for name in CATEGORIES
    }
    own = {
        name: text for framework in REPORTING_FRAMEWORKS.values() for name, text in framework.figures.items()
    }
    return {
        "type": "object",
        "properties": {
            "framework": {"enum": list(REPORTING_FRAMEWORKS), "description": "The name of the framework."},
            "title": {"type": "string", "description": "The same as its makers write it."},
            "ordinal": {
                "type": ["integer", "null"],
                "description": "The framework's own number of this device; null when it did not give one.",
            },
            "categories": {
                "type": "object",
                "properties": categories,
                "description": "PyTorch's live bytes by their purpose; empty where they were not counted.",
            },
            "settings": {
                "type": "object",
                "properties": {
                    name: {"type": "string", "pattern": f"^({form})$"} for name, form in _SETTINGS
                },
                "description": "The settings of PyTorch's allocator; one that is not known is absent.",
            },
            "pinned": {
                "type": ["integer", "null"],
                "description": "Host memory that the process has pinned for GPUs; null when not known.",
            },
            "pinned_in_use": {
                "type": ["integer", "null"],
                "description": "Those of them that the program uses; null when not known.",
            },
            **{
                name: {"type": ["integer", "null"], "description": f"{text}; null when not known."}
                for name, text in POOL_FIGURES.items()
            },
            **{
                name: {"type": "integer", "description": f"{text}."}
                for name, text in own.items()
                if name not in POOL_FIGURES
            },
        },
        "required": [
            "framework",
            "title",
            "ordinal",
            "categories",
            "settings",
            "pinned",
            "pinned_in_use",
            *POOL_FIGURES,
        ],
    }


WRITERS = {STARTUP: startup, SCHEMA: schema}


def main() -> None:
    """Write the files again."""
    for path, write in WRITERS.items():
        path.write_text(write(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
