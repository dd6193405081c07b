"""The plan as one self-contained page: no network, no build step; names reach it as text only."""

import json
from importlib.resources import files

from spmd_rl.topology.document import document
from spmd_rl.topology.plan import Plan

PARTS = files("spmd_rl.topology") / "page_parts"


def page(plan: Plan) -> str:
    """HTML with the plan's document, style and script inside."""
    frame, style, script = ((PARTS / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js"))
    # Inside <script> only `<` can end the block (or start a comment), so this one escape makes any name harmless.
    data = json.dumps(document(plan), separators=(",", ":")).replace("<", "\\u003c")
    before, after = frame.split("/* style */")
    middle, end = after.split("/* data */")
    between, last = end.split("/* script */")
    return before + style + middle + data + between + script + last
