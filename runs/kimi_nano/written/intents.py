"""Short requests of CLINC150 (clinc/oos-eval, CC BY 3.0; its training split) for tools without parameters, and some
that none of its 150 intents serves. Left out are small talk, answers, and intents hard to tell from others."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

CLINC: Final = "oos-eval"
SERVICE: Final = "clinc"
# Domain (as utterances.DOMAINS): intents; "+" for "get_" before it, "~" for its last word first, or tool=intent.
TOOLS: Final = {
    "Banks": """+bill_due +interest_rate +min_payment +bill_balance +spending_history +transactions +expiration_date
        +apr +credit_limit +rewards_balance +credit_score +application_status +international_fees +payday +taxes +income
        +balance +insurance freeze_account pay_bill order_checks report_fraud report_lost_card redeem_rewards
        ~pin_change ~credit_limit_change get_routing_number=routing transfer_money=transfer""",
    "Restaurants": """+calories +nutrition_info +cook_time +restaurant_reviews +ingredients_list confirm_reservation
        +recipe cancel_reservation +meal_suggestion +restaurant_suggestion +ingredient_substitution place_order=order
        +order_status reserve_table=restaurant_reservation""",
    "media": "identify_song=what_song play_music update_playlist skip_song=next_song change_volume",
    "events": """+date +time +timezone +reminder +next_holiday +shopping_list +todo_list +calendar +meeting_schedule
        schedule_meeting ~calendar_update ~todo_list_update ~shopping_list_update set_reminder=reminder_update
        set_alarm=alarm set_timer=timer get_time_off_balance=pto_balance request_time_off=pto_request""",
    "iot": "control_home_device=smart_home locate_phone=find_phone sync_device reset_settings",
    "journeys": """+current_location +traffic +directions +tire_pressure +gas_type +flight_status +last_maintenance +mpg
        book_ride=uber schedule_maintenance get_fuel_level=gas get_travel_time=distance book_flight rent_car=car_rental
        report_lost_luggage=lost_luggage""",
    "places": "+plug_type +travel_alert book_hotel get_visa_rules=international_visa +vaccines",
    "qa": "translate +exchange_rate +definition +spelling calculate=calculator convert_units=measurement_conversion",
    "messages": "share_location call_contact=make_call send_text=text",
    "Weather": "+weather",
    "fun": "flip_coin roll_dice tell_joke +fun_fact",
    "assistant": "change_language change_accent rename_assistant=change_ai_name change_user_name",
}  # fmt: skip


def read(root: Path) -> Iterator[tuple[str, str, str]]:
    """(text, tool, domain) of every request; no tool where none serves it."""
    file = root / "data" / "data_full.json"
    if not file.is_file():
        return
    given, known = json.loads(file.read_text("utf-8")), {}
    for domain, listed in TOOLS.items():
        for entry in listed.split():
            tool, _, intent = entry.replace("+", "get_").partition("=")
            if entry[0] == "~":
                noun, _, verb = entry[1:].rpartition("_")
                tool = f"{verb}_{noun}"
            known[intent or entry.lstrip("+~")] = (tool, domain)
    for text, intent in given["train"]:
        if intent in known:
            yield text, *known[intent]
    # Only some of them: a model that learns to refuse too often also refuses calls that a tool could make.
    for text, _ in [*given["oos_train"], *given["oos_val"], *given["oos_test"][::2]]:
        yield text, "", ""
