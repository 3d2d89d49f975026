"""Adds which of a layout's names of its base model are aliases."""

from __future__ import annotations

import json
import re

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

_TARGETS = re.compile(r'"targets":\s*\[')  # the last field of a layout


def upgrade() -> None:
    op.add_column(
        "layout_bases",
        sa.Column("is_alias", sa.Boolean(), nullable=False, server_default=sa.false()),
    )
    conn = op.get_bind()
    with_aliases = "SELECT layout_id FROM layout_bases GROUP BY layout_id HAVING count(*) > 1"
    for layout_id in conn.scalars(sa.text(with_aliases)).all():
        body = sa.text("SELECT body FROM layouts WHERE layout_id = :layout_id")
        text = conn.execute(body, {"layout_id": layout_id}).scalar_one()
        mark = sa.text(
            "UPDATE layout_bases SET is_alias = :is_alias "
            "WHERE layout_id = :layout_id AND base_model <> :base_model"
        )
        values = {"is_alias": True, "layout_id": layout_id, "base_model": _base_model(text)}
        conn.execute(mark, values)


def _base_model(body: str) -> str:
    targets = _TARGETS.search(body)
    assert targets is not None
    return str(json.loads(body[: targets.start()] + '"targets":[]}')["base_model"])
