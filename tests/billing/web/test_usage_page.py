import csv
import io
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from html import unescape

import pytest
from django.db.backends.postgresql.psycopg_any import DateTimeTZRange
from django.test import Client

from accounts.models import Membership, Role, Team, User
from billing.models import MeterInterval
from billing.services import set_quantity
from billing.web.months import Month
from tests.conftest import signed_in


def used(team: Team, subject_id: str, start: datetime, end: datetime, mib: int = 2048) -> None:
    MeterInterval.objects.create(
        team=team,
        subject_id=subject_id,
        meter=MeterInterval.Meter.MEMORY,
        quantity=mib,
        period=DateTimeTZRange(start, end),
    )


@pytest.fixture
def october(alices_team: Team) -> None:
    """Two sandboxes of Alice's: 30 hours of 2 GiB over midnight, and one hour."""
    used(
        alices_team,
        "rs-c1-default-aaaaa",
        datetime(2025, 10, 9, 18, tzinfo=UTC),
        datetime(2025, 10, 11, tzinfo=UTC),
    )
    used(
        alices_team,
        "rs-c1-default-bbbbb",
        datetime(2025, 10, 31, 23, tzinfo=UTC),
        datetime(2025, 11, 1, 1, tzinfo=UTC),
    )


def test_the_page_shows_the_months_cost_by_sandbox(
    october: None, alices_browser: Client
) -> None:
    response = alices_browser.get("/usage/?month=2025-10")

    page = unescape(response.content.decode())
    assert response.context["total"] == Decimal("0.93")
    assert "$0.93" in page
    subjects = {one.subject_id: one.cost for one in response.context["subjects"]}
    assert subjects == {
        "rs-c1-default-aaaaa": Decimal("0.90"),
        "rs-c1-default-bbbbb": Decimal("0.03"),
    }


def test_the_chart_has_every_day_of_the_month(october: None, alices_browser: Client) -> None:
    chart = alices_browser.get("/usage/?month=2025-10").context["chart"]

    assert len(chart["days"]) == 31
    by_day = dict(zip(chart["days"], chart["costs"], strict=True))
    assert by_day["2025-10-09"] == pytest.approx(0.18)
    assert by_day["2025-10-10"] == pytest.approx(0.72)
    assert by_day["2025-10-12"] == 0


def test_the_csv_adds_up_to_the_page(october: None, alices_browser: Client) -> None:
    response = alices_browser.get("/usage.csv?month=2025-10")

    lines = list(csv.DictReader(io.StringIO(b"".join(response).decode())))
    assert sum(Decimal(line["cost_dollars"]) for line in lines) == Decimal("0.93")
    assert {line["day"] for line in lines} == {"2025-10-09", "2025-10-10", "2025-10-31"}


def test_a_month_without_use_says_so(alices_browser: Client) -> None:
    page = alices_browser.get("/usage/?month=2024-02").content.decode()

    assert "Nothing was used in this month" in page


@pytest.mark.parametrize("month", ["2999-01", "x", "2025-13", ""])
def test_a_month_that_is_none_shows_this_one(alices_browser: Client, month: str) -> None:
    response = alices_browser.get("/usage/", {"month": month})

    assert response.context["is_this_month"]


@pytest.mark.parametrize("path", ["/usage/?month=2025-10", "/usage.csv?month=2025-10"])
def test_a_stranger_sees_only_their_own_use(
    october: None, mallorys_browser: Client, path: str
) -> None:
    response = mallorys_browser.get(path)

    assert b"rs-c1" not in b"".join(response)


@pytest.mark.parametrize("path", ["/usage/", "/usage.csv"])
def test_it_needs_a_sign_in_and_the_right_role(alices_team: Team, path: str) -> None:
    builder = User.objects.create_user("builder@example.com", "x")
    Membership.objects.create(team=alices_team, user=builder, role=Role.BUILDER)

    assert Client().get(path).status_code == 302
    assert signed_in(builder).get(path).status_code == 403


def test_the_number_of_queries_does_not_grow(
    alices_team: Team, alices_browser: Client, django_assert_max_num_queries: object
) -> None:
    for number in range(30):
        used(
            alices_team,
            f"rs-c1-default-{number:05}",
            datetime(2025, 10, 1, tzinfo=UTC),
            datetime(2025, 10, 3, tzinfo=UTC),
        )

    with django_assert_max_num_queries(9):  # type: ignore[operator]
        alices_browser.get("/usage/?month=2025-10")


def test_months_follow_each_other_over_the_year() -> None:
    assert str(Month(2026, 1).previous) == "2025-12"
    assert str(Month(2025, 12).next) == "2026-01"
    assert len(Month(2024, 2).days()) == 29


def test_stored_data_is_on_the_page_and_in_the_csv(
    alices_team: Team, alices_browser: Client
) -> None:
    since = datetime(2025, 10, 3, tzinfo=UTC)
    for quantity, at in ((20 * 1024**3, since), (0, since + timedelta(hours=365))):
        set_quantity(
            team=alices_team,
            subject_id=f"storage:{alices_team.pk}",
            meter=MeterInterval.Meter.STORAGE,
            quantity=quantity,
            at=at,
        )

    page = alices_browser.get("/usage/?month=2025-10").content.decode()
    assert "Data kept" in page
    assert "$0.20" in page

    response = alices_browser.get("/usage.csv?month=2025-10")
    lines = list(csv.DictReader(io.StringIO(b"".join(response).decode())))
    assert {line["meter"] for line in lines} == {"storage"}
    total = sum(Decimal(line["cost_dollars"]) for line in lines)
    assert round(total, 6) == Decimal("0.20")  # each line is rounded to a billionth
