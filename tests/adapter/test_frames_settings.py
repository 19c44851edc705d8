"""How large a frame is: settings from the environment, defaults from the pool's buffers, errors that name a cause."""

import math

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

from radix_pages_sglang.config import SettingError, Settings, frame_geometry
from radix_pages_sglang.hooks import describe, row_bytes

PLACEMENT, TOKENS, BYTES = "RADIX_PAGES_PLACEMENT", "RADIX_PAGES_FRAME_TOKENS", "RADIX_PAGES_FRAME_BYTES"
KIB, MIB = 1024, 1024 * 1024
LLAMA_8B = [2 * KIB] * 64
"""Bytes a slot takes in each buffer: 32 layers, keys and values, 8 heads of 128 in bfloat16."""


def pages_per_frame(page_size, rows, *, on_cuda=False, **settings):
    geometry = frame_geometry(Settings(**settings), page_size, rows, on_cuda)
    assert geometry.page_size == page_size
    return geometry.pages_per_frame


# what the environment says


def test_an_empty_environment_leaves_placement_to_the_mode_and_the_frame_to_the_pool():
    assert Settings.from_environment({}) == Settings(placement=None, frame_tokens=None, frame_bytes=None)


@pytest.mark.parametrize(
    ("chosen", "mode", "rule"),
    [
        (None, "observe", "stock"),
        (None, "place", "pack"),
        (None, "return", "pack"),
        ("stock", "place", "stock"),
        ("pack", "observe", "pack"),
    ],
)
def test_without_a_choice_observing_keeps_sglangs_order_and_the_other_modes_pack(chosen, mode, rule):
    assert Settings(placement=chosen).placement_in(mode) == rule


def test_every_setting_is_read():
    assert Settings.from_environment({PLACEMENT: "stock", TOKENS: "64"}) == Settings("stock", frame_tokens=64)
    assert Settings.from_environment({BYTES: "2097152"}) == Settings(frame_bytes=2 * MIB)


def test_the_process_environment_is_read_at_the_call(monkeypatch):
    monkeypatch.setenv(TOKENS, "48")
    monkeypatch.delenv(BYTES, raising=False)
    monkeypatch.delenv(PLACEMENT, raising=False)
    assert Settings.from_environment().frame_tokens == 48


@pytest.mark.parametrize("text", ["0", "-16", "1.5", "16k", "", " ", "\u00b2"])
@pytest.mark.parametrize("name", [TOKENS, BYTES])
def test_a_frame_that_is_no_positive_whole_number_is_refused_by_name(name, text):
    with pytest.raises(SettingError) as refused:
        Settings.from_environment({name: text})
    assert f"{name}={text}" in str(refused.value)
    assert "whole number from 1 up" in str(refused.value)


def test_an_unknown_placement_is_refused_with_the_ones_there_are():
    with pytest.raises(SettingError, match=f"{PLACEMENT}=best-fit: choose one of .*") as refused:
        Settings.from_environment({PLACEMENT: "best-fit"})
    assert "stock" in str(refused.value)
    assert "pack" in str(refused.value)


def test_tokens_and_bytes_together_are_refused_with_both_names():
    with pytest.raises(SettingError, match=f"(?s){TOKENS}.*{BYTES}.*not both"):
        Settings.from_environment({TOKENS: "64", BYTES: "2097152"})


# frames that were asked for


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("pages", [1, 4, 64, 128])
def test_tokens_are_counted_in_whole_pages(page_size, pages):
    assert pages_per_frame(page_size, LLAMA_8B, frame_tokens=page_size * pages) == pages


@pytest.mark.parametrize("tokens", [1, 15, 24])
def test_tokens_that_are_no_whole_number_of_pages_are_refused_by_name(tokens):
    with pytest.raises(SettingError, match=f"{TOKENS}={tokens} .*multiple of --page-size 16"):
        pages_per_frame(16, LLAMA_8B, frame_tokens=tokens)


def test_bytes_are_counted_over_all_layers_and_buffers():
    """A page of 16 tokens takes 16 x 64 x 2 KiB = 2 MiB here."""
    assert pages_per_frame(16, LLAMA_8B, frame_bytes=2 * MIB) == 1
    assert pages_per_frame(16, LLAMA_8B, frame_bytes=128 * MIB) == 64


def test_bytes_that_are_no_whole_number_of_pages_are_refused_by_name_and_with_the_pages_bytes():
    with pytest.raises(SettingError, match=f"{BYTES}={3 * MIB} .*multiple of a page's {2 * MIB} bytes over all"):
        pages_per_frame(16, LLAMA_8B, frame_bytes=3 * MIB)


def test_bytes_cannot_be_counted_in_a_pool_without_buffers():
    with pytest.raises(SettingError, match=f"{BYTES}=4096"):
        pages_per_frame(16, [], frame_bytes=4096)


# frames that nobody asked for


@pytest.mark.parametrize(
    ("page_size", "row", "pages"),
    [
        (16, 128, 2),  # 2 KiB a page, two make 4 KiB
        (16, 256, 1),  # exactly 4 KiB
        (16, 2048, 1),  # 32 KiB: whole granules already
        (16, 2, 128),
        (16, 192, 4),  # 3 KiB a page, four make 12 KiB
        (64, 8, 8),
    ],
)
def test_on_a_cpu_a_frame_is_the_least_run_of_pages_that_fills_4_kib_granules(page_size, row, pages):
    assert pages_per_frame(page_size, [row] * 8) == pages
    assert page_size * row * pages % (4 * KIB) == 0


@pytest.mark.parametrize(("page_size", "row", "pages"), [(16, 2048, 64), (16, 1024, 128), (64, 2048, 16)])
def test_on_cuda_the_granule_is_2_mib(page_size, row, pages):
    """16 tokens of 2 KiB make 32 KiB a page and layer: 64 of them, the frame of an 8B model; 128 of a 1B model."""
    assert pages_per_frame(page_size, [row] * 64, on_cuda=True) == pages
    assert page_size * row * pages % (2 * MIB) == 0


def test_rows_of_different_widths_share_a_frame_that_is_whole_in_each_of_them():
    """Keys of 192 bytes need 4 pages of 16 to fill granules, values of 128 need 2, scales of 40 need 32."""
    rows = [192, 128, 40]
    pages = pages_per_frame(16, rows)
    assert pages == math.lcm(4, 2, 32) == 32
    assert all(16 * row * pages % (4 * KIB) == 0 for row in rows)


def test_the_number_of_layers_changes_nothing():
    assert pages_per_frame(16, [192, 128] * 3) == pages_per_frame(16, [192, 128])


@pytest.mark.parametrize("on_cuda", [False, True])
@pytest.mark.parametrize("rows", [[128], [2048] * 64, []])
def test_at_page_size_1_a_frame_is_16_slots(on_cuda, rows):
    assert pages_per_frame(1, rows, on_cuda=on_cuda) == 16


def test_a_pool_without_buffers_has_frames_of_one_page():
    assert pages_per_frame(16, []) == 1


# what the pools say


def mha(**options):
    plain = {"dtype": torch.float16, "head_num": 2, "head_dim": 16, "layer_num": 3}
    fixed = {"size": 64, "page_size": 16, "device": "cpu", "enable_memory_saver": False}
    return MHATokenToKVPool(**fixed, **{**plain, **options})


def mla(**options):
    plain = {"dtype": torch.float16, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "layer_num": 3}
    fixed = {"size": 64, "page_size": 16, "device": "cpu", "enable_memory_saver": False}
    return MLATokenToKVPool(**fixed, **{**plain, **options})


def test_a_row_of_an_mha_pool_is_one_slot_of_keys_or_values_of_one_layer():
    assert row_bytes(mha()) == [2 * 16 * 2] * 6
    assert row_bytes(mha(dtype=torch.float32, layer_num=1)) == [2 * 16 * 4] * 2


def test_values_may_be_narrower_than_keys():
    assert row_bytes(mha(v_head_dim=8, layer_num=2)) == [64, 64, 32, 32]


def test_a_row_of_an_mla_pool_is_one_slot_of_the_latent_and_its_rope_part():
    assert row_bytes(mla()) == [(32 + 8) * 2] * 3


@pytest.mark.parametrize("pool", [mha, mla])
def test_the_rows_account_for_every_byte_of_a_pool(pool):
    """A pool holds its slots and the padding page."""
    kv = pool()
    buffers = [*kv.k_buffer, *kv.v_buffer] if pool is mha else kv.kv_buffer
    assert sum(row_bytes(kv)) * (64 + 16) == sum(buffer.numel() * buffer.element_size() for buffer in buffers)


def test_something_that_is_no_pool_has_no_rows():
    assert row_bytes(None) == []


def test_the_start_up_line_states_pages_tokens_and_bytes():
    """4 pages of 16 tokens at 6 x 64 bytes: 24,576 bytes."""
    kv = mha()
    geometry = frame_geometry(Settings(frame_tokens=64), 16, row_bytes(kv), on_cuda=False)
    line = describe(geometry, row_bytes(kv))
    assert "4 pages of 16 tokens" in line
    assert "64 tokens" in line
    assert "24576 bytes over 6 buffers" in line
