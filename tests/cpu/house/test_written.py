"""runs/kimi_nano/written: problems made of other people's sentences, from invented records in the published layouts."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from perilune.tasks.families import FAMILIES, check
from perilune.tasks.problem import Problem, Reply, answer_of
from runs.kimi_nano import card as cards
from runs.kimi_nano.written import functions, intents, prose, questions, records, statements, stories, utterances
from runs.kimi_nano.written.__main__ import main

STORIES = [
    ("Mona has 14 jars with 12 pears each. She eats 9 pears. How many pears are left?",
     "There are 14*12=<<14*12=168>>168 pears.\n168-9=<<168-9=159>>159\n#### 159"),
    ("A kettle costs $21 and a cup costs a third of it. What do both cost?",
     "The cup costs 21/3=$<<21/3=7>>7.\nTogether 21+7=$<<21+7=28>>28.\n#### 28"),
    ("Half a litre costs $3. What do 4 litres cost?", "3/0.5=<<3/0.5=6>>6\n4*6=<<4*6=24>>24\n#### 24"),
    ("Lou walks 5 km more than Ali. How far do both go?", "5+55=<<5+55=60>>60\n55+60=<<55+60=115>>115\n#### 115"),
]  # fmt: skip
MAWPS = [
    '"Ivo \'s crate has number0 figs , and number1 are eaten . How many are left ?",12.0 5.0,- number0 number1,7.0',
    "number0 jars hold number1 plums and number2 figs each . How many ?,4.0 3.0 2.0,* number0 + number1 number2,20.0",
    "Max had number0 bags of number1 nuts . He ate number2 . What is left ?,3.0 4.0 5.0,* number0 number1,12.0",
    "number0 pens cost number1 euros each . How much ?,2.0 1.5,* number0 number1,3.0",
]
ASKED = [
    "question_id,local-or-sum,cor_section,question,ex-or-im1,answer1",
    "1,local,1,where did the fox hide ?,explicit,Under the bridge.",
    "2,local,1,Why was he sad?,implicit,he was alone",
    "3,local,1,Who came?,explicit,the hare",
]
TALES = [
    "section,text",
    '1,"It was late. The fox hid under the bridge. Then the hare came, and the hare was wet. He was glad. Night fell."',
]
SENTENCES = [(1, 0, "The `` Blue Basin '' -LRB- a pool -RRB- is n't deep ."), (1, 1, "Ida swam there ."),
             *[(2, i, f"Line {i} is about tea .") for i in range(6)]]  # fmt: skip
ON_SENTENCES = [
    "W:x:1:0:0\t2 3\t4\t0\t3\tWhat is n't deep ?\t3\t9:2 3\t8:3",
    "W:x:1:0:0\t2 3\t4\t1\t3\tWhat is the Blue Basin ?\t6 7\t9:1 2\t8:9",
]

ON_PLACES = """mr,ref
"name[Old Oak], eatType[pub], priceRange[high], customer rating[low], familyFriendly[yes]",\
The Old Oak is a pub with a high price and a low rating.
"""
BOOKED = [("Can I book a table for six people at 7:30 pm?", [("people", 23, 33), ("time", 37, 41)]),
          ("Book it for 7 on May 3", [("time", 12, 13), ("date", 17, 22)]),
          ("Cancel my booking for 4 at 9 am", [("people", 22, 23), ("time", 27, 31)])]  # fmt: skip


def _action(act: str, slot: str, value: str) -> dict[str, Any]:
    return {"act": act, "slot": slot, "values": [value], "canonical_values": [value]}


def _functions(folder: Path) -> None:
    (folder / "possible_answer").mkdir(parents=True)
    size = {"type": "integer", "description": "Size. In cm."}
    tools = [
        {"name": "shop.order", "description": "Orders it.", "parameters": {"type": "dict", "properties": {
            "what": {"type": "string"}, "size": size, "fast": {"type": "boolean"}}}},
        {"name": "find", "parameters": {"type": "dict", "properties": {"near": {"type": "string"}}}},
    ]  # fmt: skip
    asked = [("Order a rug of 90 cm.", {"what": ["a rug", "rug"], "size": [90], "fast": ["", False]}),
             ("Order something nice.", {"what": ["vase"], "size": [""], "fast": [""]})]  # fmt: skip
    rows = [{"id": str(i), "question": [[{"role": "user", "content": text}]], "function": tools}
            for i, (text, _) in enumerate(asked)]  # fmt: skip
    right = [{"id": str(i), "ground_truth": [{"shop.order": given}]} for i, (_, given) in enumerate(asked)]
    for name, lines in (("", rows), ("possible_answer/", right)):
        (folder / f"{name}BFCL_v4_multiple.json").write_text("\n".join(map(json.dumps, lines)))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory with tiny repositories."""
    _functions(tmp_path / functions.FUNCTIONS / functions.FOLDER)
    snips = tmp_path / utterances.SNIPS / "2017-06-custom-intent-engines" / "OrderTea"
    snips.mkdir(parents=True)
    sentences = [
        [("order ", ""), ("green tea", "drink"), (" for ", ""), ("two", "cup_number"), (" in ", ""), ("Riga", "city")],
        [("bring ", ""), ("mint tea", "drink"), (" to ", ""), ("Oslo", "city")],
        [("tea?", "")],
    ]
    data = [{"data": [{"text": t, **({"entity": e} if e else {})} for t, e in s]} for s in sentences]
    (snips / "train_OrderTea_full.json").write_text(json.dumps({"OrderTea": data}))
    home = tmp_path / utterances.HOME / "CrossValidation/out4ApiaiReal/a/CrossValidation/KFold_1/merged/intents"
    home.mkdir(parents=True)
    asked = [[("dim the ", ""), ("porch", "house_place"), (" lamp", "")], [("less light", "")],
             [("darker in the ", ""), ("den", "house_place")]]  # fmt: skip
    says = [{"data": [{"text": t, **({"alias": a} if a else {})} for t, a in s]} for s in asked]
    (home / "iot_hue_lightdim.json").write_text(json.dumps({"userSays": says}))
    (home / "general_joke.json").write_text(json.dumps({"userSays": says}))
    train = tmp_path / utterances.DIALOGUES / "train"
    train.mkdir(parents=True)
    slots = [
        {"name": "pool_size", "description": "Size", "is_categorical": True, "possible_values": ["1", "2", "3"]},
        {"name": "district", "description": "Part of town", "is_categorical": False, "possible_values": []},
    ]
    wanted = [{"name": "FindPool", "description": "Find a pool", "required_slots": ["district"],
                "optional_slots": {"pool_size": "1"}},
               {"name": "BookPool", "description": "Book a pool", "required_slots": ["district"], "optional_slots": {}},
               ]  # fmt: skip
    schema = [{"service_name": "Pools_1", "slots": slots, "intents": wanted}]
    (train / "schema.json").write_text(json.dumps(schema))
    question, said = "Is there a pool in Old Harbour?", "The Blue Basin is in Old Harbour."
    state = {"active_intent": "FindPool", "requested_slots": [], "slot_values": {"district": ["Old Harbour"]}}
    turns = [
        {"speaker": "USER", "utterance": question, "frames": [{
            "service": "Pools_1", "state": state, "slots": [{"slot": "district", "start": 19, "exclusive_end": 30}],
            "actions": [_action("INFORM_INTENT", "intent", "FindPool"), _action("INFORM", "district", "Old Harbour"),
                        _action("INFORM", "pool_size", "2")]}]},
        {"speaker": "SYSTEM", "utterance": said, "frames": [{
            "service": "Pools_1", "actions": [], "slots": [{"slot": "pool_name", "start": 4, "exclusive_end": 14},
                                                           {"slot": "district", "start": 21, "exclusive_end": 32}]}]},
    ]  # fmt: skip
    dialogues = [{"dialogue_id": f"1_{i:05}", "services": ["Pools_1"], "turns": turns} for i in range(12)]
    (train / "dialogues_001.json").write_text(json.dumps(dialogues))
    gsm = tmp_path / stories.GSM8K / "grade_school_math" / "data"
    gsm.mkdir(parents=True)
    (gsm / "train.jsonl").write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in STORIES))
    mawps = tmp_path / stories.MAWPS / "data" / "cv_mawps" / "fold0"
    mawps.mkdir(parents=True)
    (mawps / "train.csv").write_text("Question,Numbers,Equation,Answer\n" + "\n".join(MAWPS) + "\n")
    tales = tmp_path / questions.FAIRYTALES / "data-by-train-split"
    for folder, name, rows in (("questions", "fox-questions", ASKED), ("section-stories", "fox-story", TALES)):
        (tales / folder / "train").mkdir(parents=True)
        (tales / folder / "train" / f"{name}.csv").write_text("\n".join(rows) + "\n")
    qamr = tmp_path / questions.SENTENCES / "data"
    (qamr / "filtered").mkdir(parents=True)
    (qamr / "wiki-sentences.tsv").write_text("".join(f"W:x:{a}:0:{b}\t{text}\n" for a, b, text in SENTENCES))
    for split in ("dev", "test"):
        (qamr / "filtered" / f"{split}.tsv").write_text("\n".join(ON_SENTENCES) + "\n")
    asked = {"question": "Who  sings?", "answers": [{"text": "the wren", "answer_start": 12}]}
    article = {"paragraphs": [{"context": "It is early. Only the wren sings.", "qas": [asked]}]}
    requests = [("flip a coin", "flip_coin"), ("what is my pin", "pin_change"), ("hello", "greeting")]
    oos = [("who invented tea", "oos")]
    marked = [
        {"userInput": {"text": t}, "labels": [{"slot": s, "valueSpan": {"startIndex": a, "endIndex": b}}
         for s, a, b in marks]} for t, marks in BOOKED
    ]  # fmt: skip
    tasks = f"{prose.TASKS}/data/finetuning/t0_train_50k/data_per_template"
    for name, text in {
        f"{prose.ORDERS}/TM-4-2024/data/data_00.json": json.dumps(
            [{"utterances": [{"speaker": "user", "text": "A flat white, please."}]}]
        ),
        f"{prose.STORYBOOK}/en/0001.md": "# The goat\n\n##\nA goat\nslept.\n\n##\n* License: [CC-BY]\n* Text: Ada\n",
        f"{prose.STORYBOOK}/en/0002.md": "# The cow\n\n##\nNo.\n\n##\n* License: [CC-BY-NC]\n",
        **{
            f"{tasks}/quartz_{way}.jsonl": "".join(
                json.dumps({"prompt": f"{way} {i}?\n", "completion": f"{i}<|endoftext|>"}) + "\n" for i in range(3)
            )
            for way in ("ask", "beg")
        },
        f"{questions.ARTICLES}/xquad.en.json": json.dumps({"data": [article]}),
        f"{statements.PLACES}/devset.csv": ON_PLACES,
        f"{intents.CLINC}/data/data_full.json": json.dumps(
            {"train": requests, "oos_train": oos, "oos_val": [], "oos_test": []}
        ),
        f"{utterances.TABLES}/span_extraction/restaurant8k/train_0.json": json.dumps(marked),
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture
def written(root: Path) -> records.Written:
    records.write(root, root / records.FILE)
    return records.Written(records.read(root / records.FILE))


@pytest.mark.parametrize("family", ("tool_call", "tools_multi", "json_extract", "doc_questions", "word_problems"))
def test_every_reply_is_right_by_its_familys_own_check(written: records.Written, family: str) -> None:
    rng = Random(1)
    for _ in range(300):
        made = written.draw(family, rng)
        assert made.family == family and made.split == "train" and made.key[0] in ("written", "expression")
        assert check(made, answer_of(made.reply)), made


def test_values_are_in_the_text_whatever_replaced_them(written: records.Written) -> None:
    rng, texts = Random(2), set()
    for _ in range(200):
        made = written.draw("json_extract", rng)
        text = " ".join(m["content"] for m in made.messages)
        for value in json.loads(made.reply.content).values():
            assert value is None or str(value) in text or value in range(1, 13), (value, text)
        texts.add(text)
    assert len(texts) > 150


def test_calls_have_what_is_said_without_a_mark_and_only_declared_parameters(written: records.Written) -> None:
    rng, sizes = Random(3), set()
    for _ in range(200):
        made = written.draw("tool_call", rng)
        (call,) = made.reply.tool_calls
        (spec,) = [t["function"] for t in made.tools if t["function"]["name"] == call.name]
        assert set(call.arguments) <= set(spec["parameters"]["properties"])
        assert set(spec["parameters"].get("required", ())) <= set(call.arguments)
        sizes |= {v for k, v in call.arguments.items() if k.lower().replace("_", "") == "poolsize"}
    assert sizes == {2}


def test_a_request_without_a_value_is_a_call_without_arguments(root: Path) -> None:
    found = [r for r in utterances.read(root) if r.get("source") == utterances.HOME and r["family"] == "tool_call"]
    assert sorted(r["text"] for r in found) == ["darker in the den", "dim the porch lamp", "less light"]
    tables = {r["table"]: r for r in utterances.read(root) if "table" in r}
    plain = next(r for r in found if not r["marks"])
    (call,) = utterances.problem(plain, Random(1), tables).reply.tool_calls
    assert not call.arguments and "light" in call.name.lower()


def test_two_requests_give_two_calls_and_some_are_refused(written: records.Written) -> None:
    rng = Random(4)
    counts = [len(written.draw("tools_multi", rng).reply.tool_calls) for _ in range(300)]
    assert set(counts) == {0, 2} and 10 <= counts.count(0) <= 60


def test_functions_are_called_with_values_that_the_text_has(root: Path) -> None:
    (record,) = functions.read(root)
    for seed in range(30):
        made = functions.problem(record, Random(seed), {})
        (call,) = made.reply.tool_calls
        assert call.name == "shop_order" and list(call.arguments) == ["what", "size"]
        text = made.messages[0]["content"]
        assert text == f"Order {call.arguments['what']} of {call.arguments['size']} cm." and len(made.tools) == 2
        assert made.reply.reasoning.endswith(f"size: number {call.arguments['size']}\nfast: -")


def test_solutions_with_fractions_or_numbers_from_nowhere_are_left_out(root: Path) -> None:
    found = list(stories.read(root))
    assert [r["tokens"] for r in found if r["source"] == stories.GSM8K] == [
        [["#", 0], "*", ["#", 1], "-", ["#", 2]], [["#", 0], "+", ["#", 0], "/", 3],
    ]  # fmt: skip
    assert [(r["text"], r["tokens"]) for r in found if r["source"] == stories.MAWPS] == [
        ("Ivo's crate has 12 figs, and 5 are eaten. How many are left?", [["#", 0], "-", ["#", 1]]),
        ("4 jars hold 3 plums and 2 figs each. How many?", [["#", 0], "*", "(", ["#", 1], "+", ["#", 2], ")"]),
    ]


def test_questions_about_tales_have_their_answer_once_and_the_sentence_in_the_thought(root: Path) -> None:
    (record,) = [r for r in questions.read(root) if r["source"] == questions.FAIRYTALES]
    assert record["text"][record["first"] : record["end"]] == "under the bridge"
    for seed in range(40):
        made = questions.problem(record, Random(seed), {})
        assert made.reply == Reply("under the bridge\nThe fox hid under the bridge.", "under the bridge")
        assert "The fox hid under the bridge." in made.messages[0]["content"]


def test_questions_about_sentences_have_the_widest_answer_that_two_people_gave(root: Path) -> None:
    (record,) = [r for r in questions.read(root) if r["source"] == questions.SENTENCES]
    text = record["text"]
    assert text[record["first"] : record["end"]] == "Blue Basin" and record["question"] == "What isn't deep?"
    assert 'The "Blue Basin" (a pool) isn\'t deep.' in text and len(text) > 50


def _marked(found: list[dict[str, Any]], source: str) -> list[dict[str, str]]:
    return [{slot: r["text"][a:b] for slot, a, b in r["marks"]} for r in found if r["source"] == source]


def test_cells_are_those_that_the_sentence_has_word_for_word(root: Path) -> None:
    found = list(statements.read(root))
    assert _marked(found, statements.PLACES) == [
        {"name": "Old Oak", "kind": "pub", "price_range": "high", "customer_rating": "low"}
    ]


def test_bookings_are_new_ones_with_the_number_of_people_as_a_number(root: Path) -> None:
    found = [r for r in utterances.read(root) if r.get("source") == utterances.TABLES]
    first, other = {"number_of_people": "six", "time": "7:30 pm"}, {"number_of_people": "4", "time": "9 am"}
    assert _marked([r for r in found if r["family"] == "json_extract"], utterances.TABLES) == [first, other]
    assert _marked([r for r in found if r["family"] == "tool_call"], utterances.TABLES) == [first]


def test_short_requests_are_calls_and_those_that_no_intent_serves_are_refused(root: Path) -> None:
    assert list(intents.read(root / intents.CLINC)) == [
        ("flip a coin", "flip_coin", "fun"), ("what is my pin", "change_pin", "Banks"), ("who invented tea", "", ""),
    ]  # fmt: skip
    given = list(utterances.read(root))
    (record,) = [r for r in given if r.get("intent") == ""]
    made = utterances.problem(record, Random(1), {r["table"]: r for r in given if "table" in r})
    assert not made.reply.tool_calls and check(made, answer_of(made.reply)) and made.tools
    assert {t["function"]["name"].replace("_", "").lower() for t in made.tools} <= {"flipcoin", "changepin"}


def test_questions_about_articles(root: Path) -> None:
    (record,) = [r for r in questions.read(root) if r["source"] == questions.ARTICLES]
    assert record["text"][record["first"] : record["end"]] == "the wren" and record["question"] == "Who sings?"


def test_plain_texts(root: Path) -> None:
    records.write(root, root / records.FILE)
    found = records.plain(records.read(root / records.FILE))
    assert (prose.STORYBOOK, "The goat\nA goat slept.") in found and not any("cow" in text for _, text in found)
    assert [text for source, text in found if source == prose.TASKS] == ["ask 0?\n0", "beg 1?\n1", "ask 2?\n2"]
    assert (prose.ORDERS, "User: A flat white, please.") in found
    assert any(source == questions.FAIRYTALES and text.startswith("It was late.") for source, text in found)
    assert any(text.endswith("168-9=159\nAnswer: 159") for _, text in found)
    assert any(text.startswith("User: Is there a pool in Old Harbour?\nSystem: The") for _, text in found)


def test_numbers_drawn_anew_are_those_of_the_text(written: records.Written) -> None:
    rng, answers = Random(5), set()
    for _ in range(100):
        made = written.draw("word_problems", rng)
        if "eats" in made.messages[0]["content"]:
            a, b, c = (int(m[0]) for m in list(stories._NUMBER.finditer(made.messages[0]["content"]))[:3])
            assert made.reply.content == str(a * b - c)
            answers.add(made.reply.content)
    assert len(answers) > 10


def test_only_training_problems_are_mixed_and_in_proportion(written: records.Written) -> None:
    rng, mixed = Random(6), written.mixed(FAMILIES)
    share = records.SHARE * written.count("json_extract") / records.ENOUGH
    assert 0 < share < records.SHARE and mixed["programs"] is FAMILIES["programs"]
    assert mixed["json_extract"].sample(Random(7), "heldout", True) == FAMILIES["json_extract"].sample(
        Random(7), "heldout", True
    )
    found: list[Problem] = [mixed["json_extract"].sample(rng, "train", False) for _ in range(3000)]
    count = sum(p.key[0] == "written" for p in found)
    assert 0.2 * share < count / 3000 < 3 * share and not any(p.thinking for p in found)


def test_the_same_directory_gives_the_same_file(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(root), str(root / "a")]) == main([str(root), str(root / "b")]) == 0
    assert (root / "a").read_bytes() == (root / "b").read_bytes()
    assert "2 stories: grade-school-math" in capsys.readouterr().out


def test_a_directory_without_any_of_them_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), str(tmp_path / "out")]) == 1
    assert "has none of the data sets" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(tmp_path / "none"), str(tmp_path / "out")])


def test_the_card_names_the_sets_and_their_licences(written: records.Written) -> None:
    said = cards.others(written.sources())
    plain = {prose.ORDERS: 1, prose.STORYBOOK: 1, prose.TASKS: 3}
    assert {*written.sources(), *plain} == set(records.SOURCES) and cards.others({}) == cards.of_people({}) == ""
    assert "Taskmaster-4" in cards.of_people(plain) and "(CC BY, 1 texts)" in cards.of_people(plain)
    assert "GSM8K" in said and "MIT: 2 records" in said and "CC0" in said and "CC BY-SA 4.0" in said
