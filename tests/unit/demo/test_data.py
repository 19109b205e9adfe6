from __future__ import annotations

import json
from importlib import resources

from tinsmith.demo import data
from tinsmith.demo.style import is_telegram


def plain(question: str) -> str:
    return "".join(letter for letter in question.lower() if letter.isalnum())


def test_every_answer_is_in_the_style_that_is_taught():
    answers = [example.answer for example in (*data.training(), *data.held_out())]

    assert [answer for answer in answers if not is_telegram(answer)] == []


def test_there_is_enough_to_learn_from_and_to_test_with():
    assert len(data.training()) >= 120
    assert len(data.held_out()) >= 24


def test_no_question_is_asked_twice_or_in_both_sets():
    questions = [plain(example.question) for example in (*data.training(), *data.held_out())]

    assert len(set(questions)) == len(questions)


def test_no_held_out_answer_was_trained_on():
    trained = {plain(example.answer) for example in data.training()}

    assert not trained & {plain(example.answer) for example in data.held_out()}


def test_the_file_begins_with_its_licence():
    first = resources.files("tinsmith.demo").joinpath(data.FILE).read_text().splitlines()[0]

    assert json.loads(first)["licence"] == "Apache-2.0"
