"""Questions about tools' results in everyday words, for `tools_multi`: "do I need a coat in Oslo" reads a temperature.

A row has the tool's names, what it does, its parameter and the parameter's kind; then, for each key of its result, the
key's names, the kind of its value and questions with {v} for the parameter's value. A row may go on in
the next line.
"""

import json
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from perilune.tasks.fields import Field, value
from perilune.tasks.problem import pick
from perilune.tasks.wordings import phrase

_ROWS: Final = """
get_weather current_weather weather_now|Weather of a place|city city
 temperature temp degrees temperature_c|small|how warm is it in {v}?|what's the temperature in {v}?
 |is it cold in {v}, how many degrees?|degrees in {v} right now?
 |do I need a coat in {v}? what does the thermometer say?
 humidity humidity_percent|small|how humid is it in {v}?|how damp is the air in {v}?
 wind_speed wind wind_kmh|small|how windy is {v}?|how hard does the wind blow in {v}?
 sky conditions summary|word|what does the sky over {v} look like?|what are the conditions in {v}?
get_time local_time|Local time in a city|city city
 time local_time|time|what time is it in {v}?|how late is it in {v}?
check_stock stock_of inventory_lookup|How much of an item is in the warehouse|item word
 pieces quantity in_stock units_left|big|how many {v} are left?|do we still have {v}, and how many?
 |what's our stock of {v}?|any {v} left?
 shelf location bin|code|where do we keep the {v}?|on which shelf are the {v}?
 supplier vendor|person|who do we buy the {v} from?|who delivers {v} to us?
track_parcel parcel_status where_is_package|Follows a parcel|number code
 status state|word|what's the state of parcel {v}?|how far along is {v}?|has {v} been sent?
 location city last_seen|city|where's my package {v}?|which town is parcel {v} in?|where was {v} last seen?
 arrival eta delivery_date expected|date|when will {v} get here?|on what day does parcel {v} come?
 |how long till {v} arrives, which date?
find_route directions_to plan_trip|Finds a way to a place|destination city
 distance_km distance kilometres|big|how far is it to {v}?|how many kilometres to {v}?
 duration_minutes minutes travel_time|big|how long does it take to get to {v}?
 |how much time do I need to {v}?|what's the quickest I can be in {v}, in minutes?
find_employee staff_lookup person_info|Looks up an employee|name person
 phone extension phone_number|big|how can I call {v}?|what number do I dial for {v}?|{v}'s number?
 department team division|word|where does {v} work?|which team is {v} in?
 manager boss supervisor reports_to|person|who is {v}'s boss?|who does {v} report to?
 email mail|email|how do I write to {v}?|{v}'s address for mails?
 hired start_date since|date|since when is {v} with us?|when did {v} start here?
get_balance account_info bank_account|State of an account|account code
 balance amount available|big|how much money is on {v}?|what have I got left on account {v}?
 |can I still spend anything from {v}, how much?
 owner holder account_owner|person|which person has account {v}?|who does {v} belong to?
search_product product_details item_info|Data of a product|product word
 price cost unit_price|decimal|how much is the {v}?|what does a {v} cost?|what do you charge for the {v}?
 colour color|word|what colour is the {v}?|which colour does {v} come in?
 rating stars score|decimal|is the {v} any good, what do people give it?|how do buyers rate the {v}?
 weight weight_g grams|big|how heavy is the {v}?|what does the {v} weigh?
 maker brand manufacturer|person|who makes the {v}?|which company is the {v} from?
flight_status flight_info|Details of a flight|flight code
 gate boarding_gate|code|where do I board {v}?|which gate for {v}?
 departure departs leaves_at|time|when does {v} take off?|what time does flight {v} leave?
 delay_minutes delay late_by|small|is {v} late, by how much?|how many minutes behind is {v}?
 destination to arrives_in|city|where does {v} fly to?|where will I land with {v}?
find_book library_search|Looks for a book in the library|title title
 author written_by writer|person|who wrote {v}?|who is {v} by?
 pages page_count length|big|how thick is {v}?|how long is {v}, in pages?
 due_date due return_by|date|when do I have to bring {v} back?|till when can I keep {v}?
 copies available_copies|small|can I still get {v}, how many are there?|how many copies of {v} are in?
exchange_rate currency_rate|Rate of a currency|currency word
 rate value price|decimal|what do I get for one {v}?|what is the {v} worth today?
 |how's the {v} doing, what's the rate?
order_status get_order order_lookup|An order by its number|order_id code
 total amount sum|decimal|how much was order {v}?|what do I have to pay for {v}?
 items item_count things|small|how many things are in {v}?|number of articles in order {v}?
 customer buyer client|person|who placed {v}?|which name is on order {v}?
next_train train_times departures|Next train from a station|station city
 platform track|small|where does the next train from {v} go from?|which platform in {v}?
 time departs departure|time|when's the next train out of {v}?|when can I leave {v} by train?
room_info find_room check_room|State of a meeting room|room code
 seats capacity places|small|how many of us fit in {v}?|is {v} big enough, how many people can sit there?
 free available is_free|flag|can we use {v} right now?|is anybody in {v} or is it free?
 floor level|small|how high up is {v}?|which floor do I go to for {v}?
file_info stat_file describe_file|Facts about a file|path code
 size bytes size_kb|big|how big is {v}?|how much space does {v} take?
 modified last_change changed|date|when was {v} last touched?|since when is {v} unchanged?
 owner user created_by|person|who made {v}?|who does {v} belong to?
"""  # fmt: skip


@dataclass(frozen=True, slots=True)
class Lookup:
    """A tool, its parameter, and (names of the key, kind of its value, questions) of its result."""

    names: tuple[str, ...]
    does: str
    parameter: Field
    keys: tuple[tuple[tuple[str, ...], str, tuple[str, ...]], ...]


def _read() -> tuple[Lookup, ...]:
    found: list[Lookup] = []
    for row in _ROWS.replace("\n |", "|").strip().split("\n"):
        parts = row.strip().split("|")
        if row.startswith(" "):
            last = found[-1]
            key = (tuple(parts[0].split()), parts[1], tuple(parts[2:]))
            found[-1] = Lookup(last.names, last.does, last.parameter, (*last.keys, key))
        else:
            name, kind = parts[2].split()
            found.append(Lookup(tuple(parts[0].split()), parts[1], Field(name, name.replace("_", " "), kind), ()))
    return tuple(found)


LOOKUPS: Final = _read()


@dataclass(frozen=True, slots=True)
class Finding:
    """A request, its call's tool and arguments, the specification, the result, and the key and value asked for."""

    text: str
    name: str
    arguments: dict[str, Any]
    spec: dict[str, Any]
    result: str
    key: str
    value: Any


def finding(rng: Random) -> Finding:
    one = pick(rng, LOOKUPS)
    name, given = pick(rng, one.names), value(rng, one.parameter)
    keys = list(one.keys)
    rng.shuffle(keys)
    keys = keys[: 1 + int(rng.random() * len(keys))]
    names, kind, questions = keys[0]
    drawn = {pick(rng, n): value(rng, Field("", "", k)) for n, k, _ in keys[1:]}
    key = pick(rng, names)
    while key in drawn:
        key = pick(rng, names)
    asked = value(rng, Field("", "", kind))
    items = [*drawn.items(), (key, asked)]
    rng.shuffle(items)
    if rng.random() < 0.4:
        items.insert(0, (one.parameter.name, given))
    shown = dict(items) if rng.random() < 0.9 else {"result": dict(items)}
    question = pick(rng, questions)
    if rng.random() < 0.7:
        question = question[0].upper() + question[1:]
    text = phrase(rng, question).format(v=given)
    spec = {"type": "function", "function": {"name": name, "description": one.does, "parameters": {
        "type": "object", "properties": {one.parameter.name: one.parameter.schema(rng, 0.4)},
        "required": [one.parameter.name]}}}  # fmt: skip
    return Finding(text, name, {one.parameter.name: given}, spec, json.dumps(shown, ensure_ascii=False), key, asked)
