"""The explorer in headless Chromium: saved pages, and models of other kinds than the included one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import vitrail
from tests.serve.conftest import running
from tests.serve.pages import address, wait
from vitrail.checkpoints import Bundle
from vitrail.checkpoints.native import save
from vitrail.data.preprocess import Preprocess
from vitrail.models import create_model
from vitrail.serve.explorations import example_images
from vitrail.serve.saved_page import saved_page

pytestmark = pytest.mark.slow


def test_token(included: Bundle, open_page: Any) -> None:
    with running(lambda: included, token="secret") as client:
        page = open_page(address(client), expected=("401",))
        wait(page, "document.getElementById('token-dialog').open")
        page.fill("#token", "wrong")
        page.locator("#token-send").click()
        wait(page, "document.getElementById('token-hint').textContent.includes('not accepted')")
        page.fill("#token", "secret")
        page.locator("#token-send").click()
        wait(page, "document.body.dataset.drawn === '36'")
        assert "secret" not in page.url
        page.wait_for_timeout(300)
        page.close()


def test_saved_page(included: Bundle, bundle: Bundle, open_page: Any, tmp_path: Path) -> None:
    content, notes = saved_page({"included": included, "tiny": bundle}, example_images())
    assert not notes
    file = tmp_path / "page.html"
    file.write_text(content, encoding="utf-8")
    page = open_page(file.as_uri())
    wait(page, "document.querySelectorAll('.stage').length === 2 && document.body.dataset.drawn === '36'")
    assert page.locator(".stage-name span").all_inner_texts() == ["included", "tiny"]
    for view in ("Rollout", "Similarity", "Colours", "Positions", "Attention"):
        page.get_by_role("tab", name=view).click()
        page.wait_for_timeout(150)
        assert page.locator(".map-title strong").first.inner_text() != "Nothing to show here"
    page.get_by_role("tab", name="Rollout").click()
    page.select_option("#fusion", "max")
    wait(page, "document.querySelector('.map-title').textContent.includes('heads fused by maximum')")
    page.get_by_role("tab", name="Patches off").click()
    wait(page, "document.querySelector('#panel').textContent.includes('vitrail explore')")
    assert "predicts again" not in page.locator("#panel").inner_text()
    page.get_by_role("button", name="Show coffee").click()
    wait(page, "document.querySelector('.bars .label').textContent === 'espresso'")
    assert page.locator("#error").is_hidden()
    for event in ("drop", "paste"):
        page.evaluate(
            """event => {
              const files = new DataTransfer();
              files.items.add(new File(["x 0"], "mine.png", { type: "image/png" }));
              const kind = event === "drop" ? DragEvent : ClipboardEvent;
              document.dispatchEvent(new kind(event, { dataTransfer: files, clipboardData: files }));
            }""",
            event,
        )
        wait(page, "!document.getElementById('error').hidden")
        assert page.locator("#error-text").inner_text().startswith("mine.png: This saved page holds only its own images. Run")
        page.locator("#error-close").click()


def test_a_saved_page_of_some_layers_shows_the_nearest(
    included: Bundle, open_page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vitrail.serve import saved_page as module

    monkeypatch.setattr(module, "MAX_MAPS", 60_000)  # three layers of the included model
    content, notes = saved_page({"included": included}, example_images()[:1])
    assert notes == ["included: the page includes the maps of 3 of 12 layers (0, 6, 11)."]
    file = tmp_path / "page.html"
    file.write_text(content, encoding="utf-8")
    page = open_page(file.as_uri() + "#layer=8")
    wait(page, "document.querySelector('.map-title')?.textContent.includes('layer 6')")
    assert "layers 0, 6, 11" in page.locator("#caveat").inner_text()


def test_a_saved_page_of_many_tokens_has_every_view(open_page: Any, tmp_path: Path) -> None:
    """A server would send single queries of so many; the file has them all."""
    model = create_model("ViT-Ti/16", outputs=4, seed=0, width=32, depth=2, heads=1, mlp=8, patch=8, image_size=312)
    save(tmp_path / "m", model, preprocess=Preprocess(size=(312, 312)), classes=list("abcd"))
    content, _ = saved_page({"m": vitrail.load(tmp_path / "m")}, example_images()[:1])
    file = tmp_path / "page.html"
    file.write_text(content, encoding="utf-8")
    for view in ("attention", "similarity", "positions"):
        page = open_page(f"{file.as_uri()}#view={view}&query=700")
        wait(page, "document.body.dataset.drawn")
        assert page.evaluate("document.body.dataset.drawn") == "700", view
        assert "Nothing to show" not in page.locator(".map-title").inner_text()


def test_all_values_of_a_regression_are_shown_alike(open_page: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = create_model("ViT-Ti/16", outputs=10, seed=0, width=32, depth=2, heads=2, mlp=64, patch=8, image_size=32)
    torch.nn.init.normal_(model.head.weight, std=0.5)
    save(tmp_path / "m", model, preprocess=Preprocess(size=(32, 32)), classes=[f"value {n}" for n in range(10)], task="regress")
    with running(lambda: vitrail.load(tmp_path / "m")) as client:
        page = open_page(address(client))
        wait(page, "document.querySelectorAll('.bars li').length")
        labels = page.locator(".bars .label")
        assert labels.all_inner_texts() == [f"value {number}" for number in range(10)]
        assert len(set(labels.evaluate_all("found => found.map(e => getComputedStyle(e).fontWeight)"))) == 1  # none is the best
        page.close()


def test_labels_below_their_threshold_are_explained(bundle: Bundle, open_page: Any) -> None:
    several = dataclasses.replace(bundle, task="multilabel")
    several.provenance = {**bundle.provenance, "task": {"thresholds": [0.999] * bundle.model.config.outputs}}
    for model, shown in ((several, True), (bundle, False)):
        with running(lambda model=model: model) as client:
            page = open_page(address(client))
            wait(page, "document.querySelectorAll('.bars li').length")
            assert ("Grey: below the label’s threshold." in page.locator("#predictions").inner_text()) is shown
            assert page.locator("#head-control").inner_text().split()[:2] == ["Head", "mean"]
            page.click("#views-rollout")
            wait(page, "document.querySelector('#head-control').hidden")
            page.close()


def test_a_resnet_next_to_a_vit(bundle: Bundle, open_page: Any, tmp_path: Path) -> None:
    """Layers, heads and patches are those of the ViT, on whichever side it is."""
    torch.manual_seed(0)
    model = create_model("BiT-R50x1", outputs=4, seed=0, image_size=32, layers=(1,), multiplier=0.5)
    torch.nn.init.normal_(model.head.weight, std=0.5)
    save(tmp_path / "bit", model, preprocess=Preprocess(size=(32, 32)), classes=["ant", "bee", "cat", "dog"])
    with running(lambda: vitrail.load(tmp_path / "bit"), second=lambda: bundle) as client:
        page = open_page(address(client, "#model=tiny&model2=second&view=attention&layer=1&query=3&off=2.3"))
        wait(page, "document.querySelectorAll('.stage').length === 2")
        title = "Attention of patch 0, 2layer 1, mean of all heads"
        wait(page, f"document.querySelectorAll('.map-title')[1].textContent === '{title}'")
        assert "is a ResNet and has no attention" in page.locator(".map-title").first.inner_text()
        assert page.locator(".overview").count() == 1 and page.locator("#depth").is_visible()  # no overview of what has no layers
        wait(page, "document.querySelectorAll('.prediction-group .hint').length === 2")
        counts = [text.split(" patches")[0] for text in page.locator(".prediction-group .hint").all_inner_texts()]
        assert counts == ["8 of 64", "2 of 16"]  # the same part of the image
        page.get_by_role("button", name="End the comparison").click()
        wait(page, "document.querySelectorAll('.stage').length === 1 && !location.hash.includes('model2')")
        page.close()
