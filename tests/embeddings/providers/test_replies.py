"""Binding vectors to texts: a reply that fails a check binds nothing."""

from __future__ import annotations

import base64
import json
import math

import numpy as np
import pytest

from embeddings.errors import DimensionMismatch, ReplyNotFinite, ReplyRefused, TextRefused
from embeddings.providers.replies import bind, in_order, listed


def encoded(*numbers: float) -> str:
    return base64.b64encode(np.array(numbers, "<f4").tobytes()).decode()


class TestBind:
    def test_floats_whole_numbers_numeric_text_and_base64(self) -> None:
        bound = bind([[1.5, 2], ["1.5", "2e0"], encoded(1.5, 2)], 3, None)
        assert bound.dtype == np.float32
        assert bound.tolist() == [[1.5, 2.0]] * 3

    @pytest.mark.parametrize("count", [0, 1, 3])
    def test_another_count_than_texts(self, count: int) -> None:
        with pytest.raises(ReplyRefused, match=f"2 texts were sent and {count} vectors came back"):
            bind([[1.0]] * count, 2, None)

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None, "nan", "inf", 1e39, "-1e300"], ids=repr)
    def test_a_number_that_is_not_finite_is_tied_to_a_text(self, bad: object) -> None:
        with pytest.raises(ReplyNotFinite) as raised:
            bind([[1.0, bad]], 1, None)
        assert isinstance(raised.value, TextRefused)

    def test_base64_that_is_not_finite(self) -> None:
        with pytest.raises(ReplyNotFinite):
            bind([encoded(1.0, math.nan)], 1, None)

    @pytest.mark.parametrize("bad", ["x", "", "1,5", True, [1.0], {}, b"1"], ids=repr)
    def test_what_is_no_number(self, bad: object) -> None:
        with pytest.raises(ReplyRefused) as raised:
            bind([[1.0, bad]], 1, None)
        assert not isinstance(raised.value, TextRefused)

    @pytest.mark.parametrize("bad", [None, 1.0, {}, True, "not base64!", "AAA=", encoded(1.0)[:-2]], ids=repr)
    def test_what_is_no_vector(self, bad: object) -> None:
        with pytest.raises(ReplyRefused):
            bind([bad], 1, None)

    @pytest.mark.parametrize("vectors", [[[], []], [[1.0], [1.0, 2.0]], [[1.0], []], ["", ""]], ids=repr)
    def test_lengths_that_differ_or_are_nothing(self, vectors: list) -> None:
        with pytest.raises(ReplyRefused, match="dimensions"):
            bind(vectors, 2, None)

    def test_other_dimensions_than_the_generations_name_both(self) -> None:
        with pytest.raises(DimensionMismatch, match=r"the reply has 2 dimensions, this generation has 3"):
            bind([[1.0, 2.0]], 1, 3)

    def test_its_dimensions(self) -> None:
        assert bind([[1.0, 2.0]], 1, 2).shape == (1, 2)


class TestInOrder:
    def test_by_index(self) -> None:
        items = [{"index": index, "embedding": [index]} for index in (2, 0, 1)]
        assert in_order(items, 3) == [[0], [1], [2]]

    def test_by_place_where_every_index_is_missing(self) -> None:
        assert in_order([{"embedding": [7]}, {"embedding": [8]}], 2) == [[7], [8]]

    @pytest.mark.parametrize(
        "indices", [(0, 0), (0, 2), (-1, 0), (1, 2), (0, None), ("0", "1"), (0.0, 1.0), (False, True)], ids=repr
    )
    def test_indices_that_do_not_name_each_text_once(self, indices: tuple) -> None:
        with pytest.raises(ReplyRefused, match="indices"):
            in_order([{"index": index, "embedding": [1.0]} for index in indices], 2)

    @pytest.mark.parametrize("items", [[], [{"embedding": [1.0]}] * 3], ids=repr)
    def test_another_count(self, items: list) -> None:
        with pytest.raises(ReplyRefused, match="2 texts were sent"):
            in_order(items, 2)

    @pytest.mark.parametrize("item", [None, [1.0], {"index": 0}, "text"], ids=repr)
    def test_what_is_no_item(self, item: object) -> None:
        with pytest.raises(ReplyRefused, match="no embedding"):
            in_order([item], 1)


class TestListed:
    def test_the_list(self) -> None:
        assert listed(b'{"data": [1]}', "data", "") == [1]
        assert listed(b"[1]", None, "") == [1]

    @pytest.mark.parametrize(
        "body",
        [b"", b"<html>", b"[]", b"{}", b"null", b'{"data": 1}', b'{"data": null}', b"\xff\xfe", b"[" * 100_000],
        ids=lambda body: repr(body[:9]),
    )
    def test_anything_else(self, body: bytes) -> None:
        with pytest.raises(ReplyRefused, match="not an embedding reply"):
            listed(body, "data", "")

    def test_it_quotes_without_the_secret_and_within_bounds(self) -> None:
        with pytest.raises(ReplyRefused) as raised:
            listed(json.dumps("sesame " * 500).encode(), "data", "sesame")
        assert "sesame" not in str(raised.value)
        assert len(str(raised.value)) < 400
