"""The explorer in headless Chromium: a real image, real clicks, and no request to anywhere else."""

from __future__ import annotations

import json
import statistics
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import DESKTOP, Client, running
from tests.serve.pages import PHONE, address, wait
from vitrail.checkpoints import Bundle
from vitrail.serve.explorations import example_images

pytestmark = pytest.mark.slow
HOVER = """async (count) => {
  const frame = document.querySelector(".frame"), box = frame.getBoundingClientRect(), times = [];
  for (let k = 0; k < count; k++) {
    const column = (k * 5) % 8, row = (k * 3) % 8, query = String(row * 8 + column), began = performance.now();
    const place = { clientX: box.left + (column + .5) * box.width / 8, clientY: box.top + (row + .5) * box.height / 8 };
    frame.dispatchEvent(new PointerEvent("pointermove", { ...place, bubbles: true, pointerType: "mouse" }));
    while (document.body.dataset.drawn !== query) await new Promise(requestAnimationFrame);
    times.push(performance.now() - began);
  }
  return times;
}"""

COLUMN = """(layer) => {
  const canvas = document.querySelector(".overview"), gap = 1, cells = 8;
  const data = canvas?.getContext("2d").getImageData(layer * (cells + gap), 0, cells, canvas.height).data ?? [];
  return data.reduce((sum, value) => sum + value, 0);
}"""  # how much is drawn of a layer in the overview


@pytest.fixture(scope="module")
def server(included: Bundle) -> Iterator[Client]:
    with running(lambda: included) as client:
        yield client


def drawn(page: Any) -> str:
    """Return the pixels of the picture as a string."""
    return str(page.evaluate("document.querySelector('.picture').toDataURL()"))


def test_upload_bars_hover_overview_and_slider(server: Client, included: Bundle, open_page: Any, tmp_path: Path) -> None:
    page = open_page(address(server))
    wait(page, "document.body.dataset.drawn === '36' && document.querySelectorAll('.bars li').length === 6")  # before any upload
    file = tmp_path / "coffee.jpg"
    file.write_bytes(example_images()[1].data)
    page.set_input_files("#file", str(file))
    expected = included.predict(file.read_bytes(), precision="fp32")[0]
    wait(page, f"document.querySelector('.bars .label').textContent === {json.dumps(expected[0].label)}")
    assert page.locator(".bars .number").first.inner_text() == f"{100 * expected[0].score:.1f} %"
    wait(page, "document.body.dataset.drawn === '36'")
    before = drawn(page)
    box = page.locator(".frame").bounding_box()
    page.mouse.move(box["x"] + 0.2 * box["width"], box["y"] + 0.3 * box["height"])
    wait(page, "document.body.dataset.drawn === '17'")  # row 2, column 1
    assert drawn(page) != before and "strongest" in page.locator(".tip").inner_text()
    page.mouse.click(box["x"] + 0.2 * box["width"], box["y"] + 0.3 * box["height"])
    page.mouse.move(5, 5)
    wait(page, "document.body.dataset.drawn === '17' && location.hash.includes('query=17')")  # pinned
    page.locator(".frame").focus()
    page.keyboard.press("ArrowRight")
    wait(page, "document.body.dataset.drawn === '18'")
    page.locator("#depth").fill("2")
    wait(page, "document.querySelector('.map-title').textContent.includes('layer 2, mean')")
    overview = page.locator(".overview").bounding_box()
    page.mouse.click(overview["x"] + overview["width"] * 9.5 / 12, overview["y"] + overview["height"] * 2.5 / 4)
    wait(page, "document.querySelector('.map-title').textContent.includes('layer 9, head 1')")
    page.reload()  # the address keeps the choice; an uploaded image is not in it
    wait(page, "document.querySelector('.map-title')?.textContent.includes('layer 9, head 1')")
    assert page.locator(".map-title strong").inner_text() == "Attention of patch 2, 2"


def test_hover_does_not_wait(server: Client, open_page: Any) -> None:
    page = open_page(address(server))
    wait(page, "document.body.dataset.drawn === '36'")
    page.wait_for_timeout(1000)
    times = page.evaluate(HOVER, 60)
    assert statistics.median(times) < 100, times  # benchmarks/explorer_hover.py measures it on a quiet machine


def test_views_panels_and_patches_off(server: Client, included: Bundle, open_page: Any) -> None:
    page = open_page(address(server, "#layer=9"))
    wait(page, "document.body.dataset.drawn === '36'")
    seen = {drawn(page)}
    for view in ("Rollout", "Similarity", "Colours", "Positions"):
        page.get_by_role("tab", name=view).click()
        wait(page, f"document.querySelector('[role=tab][aria-selected=true]').textContent === '{view}'")
        page.wait_for_timeout(250)
        seen.add(drawn(page))
        title = page.locator(".map-title strong").inner_text()
        assert page.locator("#status").inner_text().startswith(title)  # what a screen reader reads
    assert len(seen) == 5
    page.get_by_role("tab", name="Layers").click()
    wait(page, "document.querySelectorAll('.read-out li').length === 12")
    page.get_by_role("tab", name="Distance").click()
    wait(page, "document.querySelectorAll('.dot').length === 36")
    page.get_by_role("tab", name="Patches off").click()
    first = included.stored_preprocess()(example_images()[0].data)[None]
    first[:, :, :8, :8] = first[:, :, 16:24, 24:32] = 0
    box = page.locator(".frame").bounding_box()
    for row, column in ((0, 0), (2, 3)):
        page.mouse.click(box["x"] + (column + 0.5) * box["width"] / 8, box["y"] + (row + 0.5) * box["height"] / 8)
    best = included.predict(first, precision="fp32")[0][0]
    wait(page, f"document.querySelector('.bars .number').textContent.startsWith('{100 * best.score:.1f} %')")
    assert page.locator(".ghost").count() and "off=0.19" in page.evaluate("location.hash")
    changes = [text.strip() for text in page.locator(".bars small").all_inner_texts()]
    assert changes and not {"+0.0", "−0.0"} & set(changes)  # zero has no sign


def test_comparison_tour_and_files(server: Client, open_page: Any) -> None:
    page = open_page(address(server))
    wait(page, "document.body.dataset.drawn === '36'")
    page.get_by_role("button", name="Compare").click()
    page.select_option("#compare-image", "1")
    page.locator("#compare-show").click()
    wait(page, "document.querySelectorAll('.stage').length === 2")
    box = page.locator(".frame").nth(1).bounding_box()
    page.mouse.move(box["x"] + 0.05 * box["width"], box["y"] + 0.05 * box["height"])
    wait(page, "[...document.querySelectorAll('.map-title strong')].every(e => e.textContent === 'Attention of patch 0, 0')")
    low, high = page.locator(".legend").all_inner_texts()
    assert low == high and page.locator(".prediction-group").count() == 2  # one colour scale
    page.mouse.move(5, 5)
    with page.expect_download() as download:
        page.get_by_role("button", name="JSON").click()
    content = json.loads(Path(download.value.path()).read_text())
    assert len(content["items"]) == 2 and len(content["items"][0]["map"]["patches"]) == 8
    assert sum(map(sum, content["items"][0]["map"]["patches"])) == pytest.approx(1, abs=0.02)  # there are no prefix tokens
    with page.expect_download() as download:
        page.get_by_role("button", name="PNG").click()
    assert Path(download.value.path()).read_bytes().startswith(b"\x89PNG")
    page.get_by_role("tab", name="Patches off").click()
    page.get_by_role("button", name="Lowest quarter").click()
    wait(page, "location.hash.includes('off=')")
    page.get_by_role("button", name="Tour").click()
    wait(page, "!location.hash.includes('off=')")  # it explains the whole image
    steps = int(page.locator("#tour-count").inner_text().split()[-1])
    for _ in range(steps):
        assert page.locator("#tour").is_visible()
        page.locator("#tour-next").click()
    assert steps >= 5 and not page.locator("#tour").is_visible()


def test_two_pictures_on_a_phone_have_one_size(server: Client, open_page: Any) -> None:
    page = open_page(address(server, "#image2=1"), PHONE, has_touch=True, is_mobile=True)
    wait(page, "document.querySelectorAll('.stage').length === 2")
    first, second = (page.locator(".frame").nth(number).bounding_box() for number in (0, 1))
    assert [first[key] for key in ("y", "width", "height")] == [second[key] for key in ("y", "width", "height")]
    close = page.get_by_role("button", name="End the comparison").bounding_box()
    assert close["x"] + close["width"] <= second["x"] + second["width"] + 1  # and both names are in sight
    for name in page.locator(".stage-name strong").all():
        assert name.evaluate("e => e.scrollWidth <= e.clientWidth && e.clientWidth > 20"), name.inner_text()


def test_an_uploaded_image_can_be_chosen_again(server: Client, included: Bundle, open_page: Any, tmp_path: Path) -> None:
    page = open_page(address(server))
    wait(page, "document.querySelector('#add-image')")
    label = str(page.locator(".bars .label").first.inner_text())
    file = tmp_path / "mine.jpg"
    file.write_bytes(example_images()[1].data)
    page.set_input_files("#file", str(file))
    wait(page, "document.querySelector('[aria-label=\"Show mine.jpg\"]')")
    page.get_by_role("button", name="Show cat").click()
    wait(page, f"document.querySelector('.bars .label').textContent === {json.dumps(label)}")
    page.get_by_role("button", name="Show mine.jpg").click()
    expected = included.predict(example_images()[1].data)[0][0]
    wait(page, f"document.querySelector('.bars .label').textContent === {json.dumps(expected.label)}")
    assert page.get_by_role("button", name="Show mine.jpg").count() == 1  # not listed again
    page.get_by_role("button", name="Show cat").click()
    wait(page, f"document.querySelector('.bars .label').textContent === {json.dumps(label)}")
    page.get_by_role("button", name="Compare").click()
    page.select_option("#compare-image", label="mine.jpg")
    page.locator("#compare-show").click()
    wait(page, "document.querySelectorAll('.stage').length === 2")
    assert page.locator(".stage-name strong").all_inner_texts() == ["cat", "mine.jpg"]


def test_a_layer_that_failed_is_asked_for_again(server: Client, open_page: Any) -> None:
    page = open_page(address(server, "#layer=2"), expected=("503",))
    answers: list[Any] = []

    def answer(route: Any) -> None:
        answers.append(route.fulfill if not answers else route.continue_)
        answers[-1](**({"status": 503, "json": {"error": "Try again."}} if len(answers) == 1 else {}))

    page.route("**/attention?layer=11", answer)
    page.reload()
    wait(page, f"({COLUMN})(11) > 0")
    assert len(answers) == 2 and not page.locator("#error").is_visible()


def test_keys_move_from_the_class_token_to_the_first_patch(bundle: Bundle, open_page: Any) -> None:
    with running(lambda: bundle) as client:
        page = open_page(address(client, "#query=0&panel=off"))
        wait(page, "document.body.dataset.drawn === '0'")
        page.locator(".frame").focus()
        page.keyboard.press("Enter")  # the class token cannot be switched off
        page.keyboard.press("ArrowRight")
        wait(page, "document.body.dataset.drawn === '1'")
        assert "off=" not in page.evaluate("location.hash").replace("panel=off", "")
        page.keyboard.press("Enter")
        wait(page, "location.hash.includes('off=0')")


def test_a_bad_file_is_named(server: Client, open_page: Any, tmp_path: Path) -> None:
    page = open_page(address(server), expected=("415", "422"))
    wait(page, "document.body.dataset.drawn === '36'")
    text, cut = tmp_path / "notes.jpg", tmp_path / "cut.jpg"
    text.write_text("this is not an image")
    cut.write_bytes(example_images()[1].data[:2000])
    for file, reason in ((text, "notes.jpg: This is not an image of a known format"), (cut, "cut.jpg: truncated: ")):
        page.set_input_files("#file", str(file))
        wait(page, f"document.getElementById('error').checkVisibility() && error.textContent.startsWith({json.dumps(reason)})")
        assert page.locator("#status").inner_text().startswith("Attention of patch 4, 4")  # nothing is being computed any more
    page.get_by_role("button", name="Close the message").click()
    assert page.locator("#error").is_hidden()
    page.set_input_files("#file", str(text))
    wait(page, "document.getElementById('error').checkVisibility()")
    page.get_by_role("button", name="Show coffee").click()
    wait(page, "document.getElementById('error').hidden")


def test_the_image_dropped_last_stays(server: Client, included: Bundle, open_page: Any, tmp_path: Path) -> None:
    """A large photo can take longer than the small one that was dropped after it."""
    page = open_page(address(server))
    wait(page, "document.body.dataset.drawn === '36'")
    cat, coffee = (tmp_path / f"{image.name}.jpg" for image in example_images())
    cat.write_bytes(example_images()[0].data)
    coffee.write_bytes(example_images()[1].data)
    held: list[Any] = []

    def hold_first(route: Any) -> None:
        if held:
            route.continue_()
        else:
            held.append(route)

    page.route("**/explorer/analyse*", hold_first)
    page.set_input_files("#file", str(cat))
    while not held:
        page.wait_for_timeout(20)
    page.set_input_files("#file", str(coffee))
    label = json.dumps(included.predict(coffee)[0][0].label)
    wait(page, f"document.querySelector('.bars .label').textContent === {label}")
    with page.expect_response("**/explorer/analyse*"):
        held[0].continue_()
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(300)
    assert page.evaluate(f"document.querySelector('.bars .label').textContent === {label}")


def test_a_file_with_the_name_of_an_offered_image_is_not_in_the_address(server: Client, open_page: Any, tmp_path: Path) -> None:
    page = open_page(address(server))
    wait(page, "document.body.dataset.drawn === '36' && location.hash.includes('image=0')")
    file = tmp_path / example_images()[0].name
    file.write_bytes(example_images()[1].data)
    page.set_input_files("#file", str(file))
    wait(page, "!document.body.classList.contains('busy') && !location.hash.includes('image=')")


@pytest.mark.parametrize("way", ["paste", "drop"])
def test_an_image_is_pasted_or_dropped(server: Client, included: Bundle, open_page: Any, way: str) -> None:
    page = open_page(address(server))
    wait(page, "document.body.dataset.drawn === '36'")
    data = example_images()[1].data
    page.evaluate(
        """([way, bytes]) => {
          const files = new DataTransfer();
          files.items.add(new File([new Uint8Array(bytes)], "coffee.jpg", { type: "image/jpeg" }));
          const event = way === "paste" ? new ClipboardEvent("paste", { clipboardData: files, bubbles: true })
            : new DragEvent("drop", { dataTransfer: files, bubbles: true, cancelable: true });
          document.body.dispatchEvent(event);
        }""",
        [way, list(data)],
    )
    expected = included.predict(data)[0][0]
    wait(page, f"document.querySelector('.bars .label').textContent === {json.dumps(expected.label)}")


def test_an_address_with_impossible_values_shows_the_usual_view(server: Client, open_page: Any) -> None:
    page = open_page(address(server, "#view=rollout&fusion=median&scale=x&style=x&panel=x&head=99&layer=99&query=9999&off=7.9999"))
    wait(page, "document.body.dataset.drawn === 'all'")
    assert page.locator("#fusion").input_value() == "mean" and page.locator("#style").input_value() == "colour"
    assert page.get_by_role("tab", name="Heads").get_attribute("aria-selected") == "true"
    page.get_by_role("tab", name="Attention").click()
    wait(page, "document.querySelector('.map-title').textContent.includes('layer 11, mean of all heads')")


def test_a_dropped_image_is_sent_again(server: Client, open_page: Any) -> None:
    """The server keeps few images; one that was removed is sent again without a word."""
    page = open_page(address(server), expected=("404",))
    wait(page, "document.body.dataset.drawn === '36'")
    for number in range(26):  # more than are kept: two pixels of the corner differ
        data = bytearray(example_images()[0].data) + bytes([number])
        assert server.call("POST", "/explorer/analyse", bytes(data))[0] == 200
    page.get_by_role("tab", name="Rollout").click()
    wait(page, "document.body.dataset.drawn === 'all'")


def test_phone_dark_and_keyboard(server: Client, open_page: Any) -> None:
    page = open_page(address(server), PHONE, color_scheme="dark", has_touch=True, reduced_motion="reduce")
    wait(page, "document.body.dataset.drawn === '36'")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.locator(".frame").bounding_box()["width"] > 320
    for width in (PHONE["width"], 360):  # all views are in sight
        page.set_viewport_size({**PHONE, "width": width})
        right = page.get_by_role("tab", name="Positions").bounding_box()
        assert right["x"] + right["width"] <= width and right["y"] < page.locator(".frame").bounding_box()["y"]
    page.set_viewport_size(PHONE)
    box = page.locator(".frame").bounding_box()
    page.touchscreen.tap(box["x"] + 0.9 * box["width"], box["y"] + 0.1 * box["height"])
    wait(page, "document.body.dataset.drawn === '7'")
    assert page.get_by_role("button", name="PNG").is_visible() and page.get_by_role("button", name="JSON").is_visible()
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.get_by_role("button", name="Light or dark").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark
    unnamed = page.evaluate(
        "[...document.querySelectorAll('button, select, input:not([type=file]), [tabindex=\"0\"]')].filter(e => e.checkVisibility()"
        " && !(e.ariaLabel || e.getAttribute('aria-label') || e.textContent.trim() || e.labels?.length)).map(e => e.outerHTML)"
    )
    assert not unnamed


def test_a_finger_switches_patches_off(server: Client, open_page: Any) -> None:
    page = open_page(address(server, "#panel=off"), PHONE, has_touch=True)
    wait(page, "document.body.dataset.drawn === '36'")
    box = page.locator(".frame").bounding_box()
    finger = page.context.new_cdp_session(page)
    for kind, column in (("touchStart", 0), ("touchMove", 1), ("touchMove", 2), ("touchEnd", None)):
        places = [] if column is None else [{"x": box["x"] + (column + 0.5) * box["width"] / 8, "y": box["y"] + box["height"] / 16}]
        finger.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": places})
    wait(page, "location.hash.includes('off=0.1.2') && document.querySelectorAll('.ghost').length")
    assert page.evaluate("scrollY") == 0


def test_a_button_released_outside_ends_the_drag(server: Client, open_page: Any) -> None:
    page = open_page(address(server, "#panel=off"))
    wait(page, "document.body.dataset.drawn === '36'")
    box = page.locator(".frame").bounding_box()
    place = {column: (box["x"] + (column + 0.5) * box["width"] / 8, box["y"] + box["height"] / 16) for column in (0, 3, 5)}
    page.mouse.move(*place[0])
    page.mouse.down()
    page.mouse.move(5, 5)
    page.mouse.up()
    for column in (3, 5):
        page.mouse.move(*place[column])
    wait(page, "document.body.dataset.drawn === '5'")  # the pointer only looks
    assert page.evaluate("new URLSearchParams(location.hash.slice(1)).get('off')") == "0"


def test_reference_page(server: Client, open_page: Any) -> None:
    page = open_page(address(server, "docs"), PHONE, color_scheme="dark")
    page.get_by_text("/v1/attention", exact=True).click()
    assert page.get_by_text("Token that looks").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("getComputedStyle(document.querySelector('details')).borderRadius") == "8px"  # its style is allowed
    lines = page.locator("details[open] th code").evaluate_all("found => found.map(e => e.getClientRects().length)")
    assert lines and set(lines) == {1}  # names are not broken


def test_the_tour_hides_nothing_of_what_it_is_about(server: Client, open_page: Any) -> None:
    for viewport in (DESKTOP, PHONE):
        page = open_page(address(server), viewport, reduced_motion="reduce")
        wait(page, "document.body.dataset.drawn === '36'")
        page.get_by_role("button", name="Tour").click()
        for _ in range(4):
            wait(page, "document.querySelector('.pointed')")
            page.wait_for_timeout(300)
            part, card = page.locator(".pointed").bounding_box(), page.locator("#tour").bounding_box()
            beside = part["x"] + part["width"] <= card["x"] or card["x"] + card["width"] <= part["x"]
            assert beside or part["y"] + part["height"] <= card["y"] + 1, page.locator("#tour-title").inner_text()
            page.locator("#tour-next").click()
        page.close()


def test_focus_stays_on_a_token_and_nothing_is_wider_than_a_small_screen(bundle: Bundle, open_page: Any) -> None:
    with running(lambda: bundle) as client:
        page = open_page(address(client), {"width": 320, "height": 640})
        wait(page, "document.querySelector('.token') && document.body.dataset.drawn")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.locator(".token").focus()
        page.keyboard.press("Enter")
        wait(page, "document.body.dataset.drawn === '0'")
        assert page.evaluate("document.activeElement.className") == "token"
        page.close()


def test_nothing_can_be_clicked_before_there_is_an_image(server: Client, open_page: Any) -> None:
    page = open_page(address(server, "docs"))
    page.route("**/explorer/analyse*", lambda route: None)
    page.goto(address(server))
    wait(page, "document.getElementById('busy').textContent === 'Computing cat …'")
    for name in ("Tour", "Compare", "PNG", "JSON"):
        assert page.get_by_role("button", name=name).is_disabled()
    assert page.locator("#controls").is_hidden() and page.locator("#file").count()


def test_an_image_dropped_while_the_model_loads_is_shown_when_it_is_loaded(
    included: Bundle, open_page: Any, tmp_path: Path
) -> None:
    loaded, coffee = threading.Event(), tmp_path / "coffee.jpg"
    coffee.write_bytes(example_images()[1].data)

    def load() -> Bundle:
        assert loaded.wait(30)
        return included

    with running(load, wait=False) as client:
        page = open_page(address(client))
        wait(page, "document.getElementById('busy').textContent === 'Loading tiny …'")
        page.set_input_files("#file", str(coffee))
        page.wait_for_timeout(700)  # it asks again whether the model is loaded
        assert page.locator("#error").is_hidden()
        loaded.set()
        wait(page, f"document.querySelector('.bars .label')?.textContent === {json.dumps(included.predict(coffee)[0][0].label)}")
        wait(page, "document.querySelectorAll('.gallery .thumbnail').length === 4")  # two examples, this one, and + for others
        page.close()
