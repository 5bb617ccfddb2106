"""The page: its files come from the server alone, and its story goes through in a browser."""

import shutil
from pathlib import Path
from urllib.request import urlopen

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)


def test_the_files_load_nothing_from_elsewhere(url: str) -> None:
    for path, kind in (("/", "text/html"), ("/page.css", "text/css"), ("/page.js", "javascript")):
        with urlopen(url + path) as answer:
            text = answer.read().decode()
            assert kind in answer.headers["Content-Type"]
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert "http://" not in text
        assert "https://" not in text
        assert "innerHTML" not in text


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_a_file_is_dropped_read_and_asked(url: str, tmp_path: Path) -> None:
    sync = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    file = tmp_path / "Harbour notes.txt"
    file.write_text("The boats stay in when the wind is from the west. " * 60)
    said: list[str] = []
    with sync.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.on("console", lambda each: said.append(each.text) if each.type == "error" else None)
        page.on("pageerror", lambda each: said.append(str(each)))
        page.goto(f"{url}/")
        expect = sync.expect
        expect(page.locator("#model")).to_contain_text("tiny, 8,192 tokens")
        box = page.locator("#drop").bounding_box()
        drag = {"items": [], "files": [str(file)], "dragOperationsMask": 1}
        mouse = page.context.new_cdp_session(page)
        for kind in ("dragEnter", "dragOver", "drop"):
            mouse.send("Input.dispatchDragEvent", {
                "type": kind, "x": box["x"] + 9, "y": box["y"] + 9, "data": drag})  # fmt: skip
            # Said while it hangs over the page alone.
            expect(page.locator("#drop.over")).to_have_count(int(kind != "drop"))
        expect(page.locator("#status")).to_contain_text("can be asked now", timeout=60_000)
        expect(page.get_by_label("Harbour notes.txt", exact=True)).to_be_checked()
        page.get_by_label("Your question").fill("When do they stay in?")
        page.keyboard.press("Enter")
        expect(page.locator("#status")).to_contain_text("Done", timeout=60_000)
        expect(page.locator("#prompt")).to_contain_text("stored")
        expect(page.locator("#memory")).to_contain_text("the full cache takes")
        page.route("**/v1/chat/completions", lambda held: None)
        page.get_by_label("Your question").fill("Why?")
        page.get_by_role("button", name="Ask", exact=True).click()
        page.get_by_role("button", name="Stop", exact=True).click()
        expect(page.locator("#status")).to_have_text("Stopped")
        page.unroute("**/v1/chat/completions")
        page.reload()
        expect(page.locator("#messages li")).to_have_count(2)
        expect(page.get_by_label("Harbour notes.txt", exact=True)).to_be_checked()
        page.get_by_label("Your question").fill("And then?")
        page.get_by_role("button", name="Ask", exact=True).click()
        expect(page.locator("#status")).to_contain_text("Done", timeout=60_000)
        expect(page.locator("#messages li")).to_have_count(4)
        page.on("dialog", lambda each: each.accept())
        page.get_by_role("button", name="Delete Harbour notes.txt").click()
        expect(page.get_by_label("Harbour notes.txt", exact=True)).to_have_count(0)
        page.set_viewport_size({"width": 390, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        browser.close()
    assert said == []
