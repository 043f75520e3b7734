"""Plain values by name, as JSON has them: settings, figures, records."""

from __future__ import annotations

from typing import Any, TypeAlias

Values: TypeAlias = dict[str, Any]
