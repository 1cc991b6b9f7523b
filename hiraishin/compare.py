"""Two sets of results side by side: bits and price, before and after an edit to a patch."""

from __future__ import annotations

from typing import Any

from hiraishin.claims import Claim, claims
from hiraishin.results import ResultSet


def compare(a: ResultSet, b: ResultSet) -> list[dict[str, Any]]:
    """Claims of both sets, one row each: id, build, params, both values, and how they relate.

    ``change`` is ``same``, ``differs``, ``only in A`` or ``only in B``; ``ratio`` is B over A where both are
    numbers and A is not 0.
    """

    def keyed(items: list[Claim]) -> dict[tuple[str, str, str], Claim]:
        return {(c.id, c.build, repr(sorted(c.params.items(), key=lambda kv: kv[0]))): c for c in items}

    first, second = keyed(claims(a)), keyed(claims(b))
    rows = []
    for key in [*first, *(k for k in second if k not in first)]:
        one, two = first.get(key), second.get(key)
        claim = one or two
        assert claim is not None
        row: dict[str, Any] = {
            "id": claim.id,
            "build": claim.build,
            "params": claim.params,
            "unit": claim.unit,
            "a": one.value if one else None,
            "b": two.value if two else None,
            "ratio": None,
        }
        if one is None or two is None:
            row["change"] = "only in B" if one is None else "only in A"
        else:
            row["change"] = "same" if one.value == two.value else "differs"
            if one.value and two.value is not None:
                row["ratio"] = two.value / one.value
        rows.append(row)
    return rows
