"""Settings of returned memory: what they take, which do not go together, and which pools and options are refused."""

import logging
import math

import pytest
import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.server_args import ServerArgs

from radix_pages_sglang import hooks, support
from radix_pages_sglang.config import (
    DEFAULT_IDLE_TRIM_SECONDS,
    DEFAULT_TRIM_BUDGET_MS,
    SettingError,
    Settings,
    frame_geometry,
)
from radix_pages_sglang.pool import Mapping, create_buffers
from radix_pages_sglang.sizes import ACCEPTED
from radix_pages_sglang.support import WITH_A_BACKING, UnsupportedError

MODE, BACKING, CAP = "RADIX_PAGES_MODE", "RADIX_PAGES_BACKING", "RADIX_PAGES_MAX_CACHED_TOKENS"
CEILING, RESERVE, IDLE = (
    "RADIX_PAGES_MAX_RESIDENT_BYTES",
    "RADIX_PAGES_RESERVE_FRAMES",
    "RADIX_PAGES_IDLE_TRIM_SECONDS",
)
FREE, BUDGET = "RADIX_PAGES_FREE_FRAMES", "RADIX_PAGES_TRIM_BUDGET_MS"
GIB = 1024**3

pytestmark = pytest.mark.usefixtures("published_config")


def read(**environment):
    return Settings.from_environment(environment)


def returning(**environment):
    return read(**{MODE: "return"}, **environment)


# what the environment says


def test_an_empty_environment_observes_and_bounds_nothing():
    assert read() == Settings(
        mode="observe",
        backing="auto",
        max_cached_tokens=None,
        max_resident_bytes=None,
        reserve_frames=0,
        idle_trim_seconds=DEFAULT_IDLE_TRIM_SECONDS,
        free_frames=0,
        trim_budget_ms=DEFAULT_TRIM_BUDGET_MS,
    )


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        (MODE, "observe", "mode", "observe"),
        (MODE, "place", "mode", "place"),
        (MODE, "return", "mode", "return"),
        (MODE, "move", "mode", "move"),
        (BACKING, "none", "backing", "none"),
        (BACKING, "mmap", "backing", "mmap"),
        (BACKING, "auto", "backing", "auto"),
        (CAP, "0", "max_cached_tokens", 0),
        (CAP, "65536", "max_cached_tokens", 65536),
    ],
)
def test_every_setting_of_any_mode_is_read(name, text, field, value):
    assert getattr(read(**{name: text}), field) == value


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        (CEILING, "24GiB", "max_resident_bytes", 24 * GIB),
        (CEILING, "1.5 gib", "max_resident_bytes", 3 * GIB // 2),
        (CEILING, "1073741824", "max_resident_bytes", GIB),
        (CEILING, "4GB", "max_resident_bytes", 4 * 10**9),
        (RESERVE, "0", "reserve_frames", 0),
        (RESERVE, "12", "reserve_frames", 12),
        (IDLE, "0", "idle_trim_seconds", 0.0),
        (IDLE, "2.5", "idle_trim_seconds", 2.5),
        (IDLE, "86400", "idle_trim_seconds", 86400.0),
        (BUDGET, "0.1", "trim_budget_ms", 0.1),
        (BUDGET, "2.5", "trim_budget_ms", 2.5),
        (BUDGET, "1000", "trim_budget_ms", 1000.0),
    ],
)
def test_every_setting_of_mode_return_is_read(name, text, field, value):
    assert getattr(returning(**{name: text}), field) == value
    assert getattr(read(**{MODE: "move", name: text}), field) == value


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        (FREE, "0", "free_frames", 0),
        (FREE, "12", "free_frames", 12),
    ],
)
def test_every_setting_of_mode_move_is_read(name, text, field, value):
    assert getattr(read(**{MODE: "move", name: text}), field) == value


def test_the_process_environment_is_read_at_the_call(monkeypatch):
    monkeypatch.setenv(MODE, "return")
    monkeypatch.setenv(CEILING, "2GiB")
    assert Settings.from_environment().max_resident_bytes == 2 * GIB


@pytest.mark.parametrize(
    ("name", "texts", "takes"),
    [
        (MODE, ["", "Return", "give", "2", " place"], "choose one of observe, place, return, move"),
        (BACKING, ["", "cuda", "MMAP", "1"], "choose one of none, mmap, auto"),
        (CAP, ["", "-1", "1.5", "10k", "1e3", "nan", "\u00b2"], "a whole number from 0 up is needed"),
        (CEILING, ["", "-1", "1.5", "GiB", "24G", "half", "nan"], ACCEPTED),
        (RESERVE, ["", "-1", "0.5", "two", "inf"], "a whole number from 0 up is needed"),
        (IDLE, ["", "-1", "86401", "nan", "inf", "30s"], "to 86400 are needed"),
        (FREE, ["", "-1", "0.5", "two", "inf"], "a whole number from 0 up is needed"),
        (BUDGET, ["", "-1", "0", "0.09", "1001", "nan", "5ms"], "milliseconds from 0.1 to 1000.0 are needed"),
    ],
)
def test_anything_else_is_refused_with_the_name_and_what_it_takes(name, texts, takes):
    for text in texts:
        with pytest.raises(SettingError) as refused:
            read(**{MODE: "move", name: text})
        assert f"{name}={text}: " in str(refused.value)
        assert takes in str(refused.value)


# what does not go together


@pytest.mark.parametrize("mode", ["observe", "place", None])
@pytest.mark.parametrize(("name", "text"), [(CEILING, "24GiB"), (RESERVE, "0"), (IDLE, "30"), (BUDGET, "5")])
def test_bounds_on_memory_need_the_mode_that_returns_it(name, text, mode):
    environment = {name: text} if mode is None else {name: text, MODE: mode}
    with pytest.raises(SettingError) as refused:
        read(**environment)
    assert str(refused.value).startswith(f"{name}={text} needs RADIX_PAGES_MODE=return")
    assert str(refused.value).endswith(f"the mode is {mode or 'observe'}")


@pytest.mark.parametrize("mode", ["observe", "place", "return", None])
def test_frames_kept_free_need_the_mode_that_moves(mode):
    environment = {FREE: "0"} if mode is None else {FREE: "0", MODE: mode}
    with pytest.raises(SettingError) as refused:
        read(**environment)
    assert str(refused.value) == f"{FREE}=0 needs RADIX_PAGES_MODE=move, the mode is {mode or 'observe'}"


@pytest.mark.parametrize("mode", ["observe", "place", "return", "move"])
def test_the_cap_goes_with_every_mode(mode):
    assert read(**{MODE: mode, CAP: "7"}).max_cached_tokens == 7


@pytest.mark.parametrize("mode", ["return", "move"])
def test_memory_cannot_be_returned_without_a_backing(mode):
    with pytest.raises(SettingError, match=f"{BACKING}=none cannot give memory back: set auto, or {MODE}=place"):
        read(**{MODE: mode, BACKING: "none"})


# which backing a device has


@pytest.mark.parametrize(
    ("mode", "backing", "kind"),
    [
        ("observe", "auto", "none"),
        ("place", "auto", "none"),
        ("return", "auto", "mmap"),
        ("move", "auto", "mmap"),
        ("observe", "mmap", "mmap"),
        ("place", "none", "none"),
    ],
)
def test_on_a_cpu_memory_is_backed_where_it_is_returned_or_asked_for(mode, backing, kind):
    assert Settings(mode=mode, backing=backing).backing_on("cpu") == kind


@pytest.mark.parametrize(
    ("mode", "backing"), [("return", "auto"), ("return", "mmap"), ("observe", "mmap"), ("move", "auto")]
)
@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_on_cuda_memory_cannot_be_returned_yet(mode, backing, device):
    with pytest.raises(SettingError) as refused:
        Settings(mode=mode, backing=backing).backing_on(device)
    assert f"memory of a KV pool on {device} cannot be given back yet" in str(refused.value)
    assert "RADIX_PAGES_MODE=place" in str(refused.value)


@pytest.mark.parametrize("backing", ["auto", "none"])
def test_on_cuda_auto_is_none(backing):
    assert Settings(mode="place", backing=backing).backing_on("cuda") == "none"


# frames that fill granules


def backed(page_size, rows, **settings):
    return frame_geometry(Settings(mode="return", **settings), page_size, rows, on_cuda=False, is_backed=True)


@pytest.mark.parametrize(
    ("page_size", "rows", "multiple"),
    [(16, [128], 32), (16, [192, 128, 40], 512), (1, [256, 256], 16), (1, [16], 256), (64, [8], 512)],
)
def test_a_frame_that_does_not_fill_granules_is_refused_with_the_multiple(page_size, rows, multiple):
    for tokens in (multiple // 2, 3 * multiple // 2):
        with pytest.raises(SettingError) as refused:
            backed(page_size, rows, frame_tokens=tokens)
        assert f"a frame of {tokens} tokens does not fill whole pages of 4096 bytes" in str(refused.value)
        assert f"set RADIX_PAGES_FRAME_TOKENS to a multiple of {multiple}, or leave" in str(refused.value)
    for tokens in (multiple, 3 * multiple):
        geometry = backed(page_size, rows, frame_tokens=tokens)
        assert geometry.slots(geometry.pages_per_frame) == tokens


def test_without_a_backing_such_a_frame_is_fine():
    assert frame_geometry(Settings(frame_tokens=16), 16, [128], on_cuda=False).pages_per_frame == 1


def test_a_frame_in_bytes_that_does_not_fill_granules_is_refused_too():
    """A page takes 2 KiB and 4 KiB: three of them fill no whole granules of the first buffer."""
    with pytest.raises(SettingError, match=r"a frame of 48 tokens does not fill .* a multiple of 32, or"):
        backed(16, [128, 256], frame_bytes=3 * 6144)
    assert backed(16, [128, 256], frame_bytes=4 * 6144).pages_per_frame == 4


@pytest.mark.parametrize(
    ("rows", "slots"), [([256], 16), ([4096], 16), ([64, 64], 64), ([192, 40], math.lcm(64, 512)), ([96], 128)]
)
def test_at_page_size_1_a_backed_frame_is_the_least_multiple_of_16_slots_that_fills_granules(rows, slots):
    assert backed(1, rows).pages_per_frame == slots
    assert all(slots * row % 4096 == 0 for row in rows)


def test_at_page_size_1_a_frame_without_a_backing_stays_at_16_slots():
    assert frame_geometry(Settings(), 1, [64], on_cuda=False).pages_per_frame == 16


# options of the server


def options(**changed):
    """Read an option of a plain server on a CPU, some of them changed."""
    plain = ServerArgs(model_path="dummy", device="cpu")
    return lambda field: changed.get(field, getattr(plain, field))


REFUSED = [
    ({"enable_memory_saver": True}, "--enable-memory-saver does not work", "two owners"),
    ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm EAGLE does not work", "a draft model"),
    ({"pp_size": 2}, "--pp-size 2 does not work", "Set --pp-size 1"),
]


@pytest.mark.parametrize("environment", [{MODE: "return"}, {BACKING: "mmap"}, {MODE: "place", BACKING: "mmap"}])
@pytest.mark.parametrize(("changed", "culprit", "because"), REFUSED)
def test_options_that_do_not_go_with_a_backing_are_refused_by_flag(
    monkeypatch, environment, changed, culprit, because
):
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(UnsupportedError) as refused:
        support.check_settings(options(**changed))
    assert str(refused.value).startswith(culprit)
    assert because in str(refused.value)


@pytest.mark.parametrize("environment", [{}, {MODE: "place"}, {MODE: "observe", BACKING: "none"}])
@pytest.mark.parametrize("changed", [changed for changed, _, _ in REFUSED])
def test_without_a_backing_they_are_nobodys_business(monkeypatch, environment, changed):
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    support.check_settings(options(**changed))


def test_a_plain_server_on_a_cpu_may_return_memory(monkeypatch):
    monkeypatch.setenv(MODE, "return")
    support.check_settings(options())


def test_a_server_on_cuda_is_refused_before_any_weight_is_loaded(monkeypatch):
    monkeypatch.setenv(MODE, "return")
    with pytest.raises(SettingError, match="on cuda cannot be given back yet"):
        support.check_settings(options(device="cuda"))
    monkeypatch.setenv(MODE, "place")
    support.check_settings(options(device="cuda"))


def test_a_wrong_setting_is_refused_whatever_the_options(monkeypatch):
    monkeypatch.setenv(CAP, "many")
    with pytest.raises(SettingError, match=f"{CAP}=many"):
        support.check_settings(options())


def test_every_option_refused_with_a_backing_is_one_that_sglang_has_and_leaves_harmless():
    default = ServerArgs(model_path="dummy")
    for option in WITH_A_BACKING:
        assert getattr(default, option.field) in option.harmless


# pools


def mha(kind=MHATokenToKVPool, *, page_size=16, size=256, **fields):
    return kind(
        **{"size": size, "page_size": page_size, "dtype": torch.float16, "head_num": 2, "head_dim": 16} | fields,
        layer_num=2,
        device="cpu",
        enable_memory_saver=False,
    )


def mla():
    return MLATokenToKVPool(
        size=256,
        page_size=16,
        dtype=torch.float16,
        kv_lora_rank=32,
        qk_rope_head_dim=8,
        layer_num=2,
        device="cpu",
        enable_memory_saver=False,
    )


def stock_allocator(pool, page_size=16):
    common = {"dtype": torch.float16, "device": "cpu", "kvcache": pool, "need_sort": False}
    if page_size == 1:
        return TokenToKVPoolAllocator(256, **common)
    return PagedTokenToKVPoolAllocator(256, page_size=page_size, **common)


def test_a_pool_of_another_kind_is_refused_by_name_with_what_can_be_done(monkeypatch):
    monkeypatch.setenv(MODE, "return")
    with pytest.raises(UnsupportedError) as refused:
        hooks.frame_aware(stock_allocator(mla()))
    message = str(refused.value)
    assert message.startswith("The KV pool sglang.srt.mem_cache.memory_pool.MLATokenToKVPool")
    assert "cannot give memory back yet: MHATokenToKVPool in nhd layout with plain KV can" in message
    assert "Set RADIX_PAGES_MODE=place" in message


def test_a_refusal_says_what_is_wrong_with_a_pool_of_the_right_kind():
    pool = mha()
    pool.kv_cache_layout = "hnd"
    assert "MHATokenToKVPool in hnd layout cannot" in str(support.backing_refusal(pool))
    pool.quant_method = "something else than SGLang's UnquantizedKVCacheMethod"
    assert "MHATokenToKVPool with quantized KV cannot" in str(support.backing_refusal(pool))


def test_no_pool_at_all_is_refused_too(monkeypatch):
    monkeypatch.setenv(MODE, "return")
    with pytest.raises(UnsupportedError, match=r"The KV pool builtins\.NoneType cannot give memory back"):
        hooks.frame_aware(stock_allocator(None))


class Made(Exception):
    """SGLang makes the buffers itself."""


def stock_buffers(pool):
    raise Made


@pytest.fixture
def selected(monkeypatch):
    monkeypatch.setattr(hooks, "is_selected", lambda: True)


def test_the_buffers_of_a_plain_pool_come_from_a_mapping(selected, monkeypatch):
    pool = mha()
    monkeypatch.setenv(MODE, "return")
    assert hooks._create_buffers(stock_buffers, pool) is None
    assert isinstance(pool.radix_pages_mapping, Mapping)
    start, end = pool.radix_pages_mapping.start, pool.radix_pages_mapping.end
    assert all(start <= buffer.data_ptr() < end for buffer in (*pool.k_buffer, *pool.v_buffer))


def test_a_backing_may_be_asked_for_without_returning_anything(selected, monkeypatch):
    pool = mha()
    monkeypatch.setenv(BACKING, "mmap")
    hooks._create_buffers(stock_buffers, pool)
    allocator = hooks.frame_aware(stock_allocator(pool))
    assert allocator.residency.ledger.num_returned_frames == 0
    assert allocator.residency.committed_bytes == pool.radix_pages_mapping.size


@pytest.mark.parametrize("mode", ["observe", "place"])
def test_without_a_backing_sglang_makes_the_buffers(selected, monkeypatch, mode):
    monkeypatch.setenv(MODE, mode)
    with pytest.raises(Made):
        hooks._create_buffers(stock_buffers, mha())


def test_pools_of_other_kinds_and_layouts_and_other_caches_keep_their_buffers(selected, monkeypatch):
    class Widened(MHATokenToKVPool):
        pass

    monkeypatch.setenv(MODE, "return")
    other_layout = mha()
    other_layout.kv_cache_layout = "hnd"
    for pool in (mla(), mha(Widened), other_layout):
        with pytest.raises(Made):
            hooks._create_buffers(stock_buffers, pool)
        assert not hasattr(pool, "radix_pages_mapping")
    monkeypatch.setattr(hooks, "is_selected", lambda: False)
    with pytest.raises(Made):
        hooks._create_buffers(stock_buffers, mha())


# what the pool makes of the settings


def returned_pool(monkeypatch, *, page_size=16, **environment):
    """An allocator over a pool whose pages take 1 KiB in each of 4 buffers, or 64 bytes at page size 1."""
    for name, text in ({MODE: "return"} | environment).items():
        monkeypatch.setenv(name, text)
    pool = mha(page_size=page_size)
    pool.radix_pages_mapping = create_buffers(pool)
    return hooks.frame_aware(stock_allocator(pool, page_size))


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_pool_starts_with_frame_0_alone(monkeypatch, page_size):
    """Frames of 64 slots and 16 KiB, five of them with the padding page's."""
    allocator = returned_pool(monkeypatch, page_size=page_size)
    residency = allocator.residency
    assert (residency.backing.frame_bytes, residency.ledger.num_frames) == (16384, 5)
    assert residency.committed_bytes == residency.backing.resident_bytes() == 16384
    assert allocator.available_size() == 256


def test_the_reserve_is_committed_from_the_start(monkeypatch):
    residency = returned_pool(monkeypatch, **{RESERVE: "2"}).residency
    assert residency.committed_bytes == residency.backing.resident_bytes() == 3 * 16384


def test_a_ceiling_is_counted_in_whole_frames(monkeypatch):
    assert returned_pool(monkeypatch, **{CEILING: str(3 * 16384 + 16383)}).residency.max_frames == 3


@pytest.mark.parametrize(
    ("environment", "holds", "least"),
    [({CEILING: "16KiB"}, 1, 2), ({CEILING: "0"}, 0, 2), ({CEILING: "48KiB", RESERVE: "2"}, 3, 4)],
)
def test_a_ceiling_that_holds_too_little_is_refused_with_the_least(monkeypatch, environment, holds, least):
    with pytest.raises(SettingError) as refused:
        returned_pool(monkeypatch, **environment)
    assert f"{CEILING}=" in str(refused.value)
    assert f"holds {holds} frames of 16384 bytes; {least} are the least that can serve" in str(refused.value)


def test_a_reserve_larger_than_the_pool_is_refused(monkeypatch):
    with pytest.raises(SettingError, match=f"{RESERVE}=5: the pool has 4 frames"):
        returned_pool(monkeypatch, **{RESERVE: "5"})
    assert returned_pool(monkeypatch, **{RESERVE: "4"}).residency.committed_frames == 5


def test_more_free_frames_than_leave_room_to_serve_are_refused(monkeypatch):
    with pytest.raises(SettingError, match=f"{FREE}=4: of 5 frames 2 are the least that can serve"):
        returned_pool(monkeypatch, **{MODE: "move", FREE: "4"})
    residency = returned_pool(monkeypatch, **{MODE: "move", FREE: "3"}).residency
    assert (residency.free_frames, residency.committed_frames) == (3, 1)


def test_a_plain_server_on_a_cpu_may_move_pages(monkeypatch):
    monkeypatch.setenv(MODE, "move")
    support.check_settings(options())
    with pytest.raises(SettingError, match="on cuda cannot be given back yet"):
        support.check_settings(options(device="cuda"))


@pytest.mark.parametrize(("changed", "culprit", "because"), REFUSED)
def test_mode_move_refuses_the_options_that_mode_return_refuses(monkeypatch, changed, culprit, because):
    monkeypatch.setenv(MODE, "move")
    with pytest.raises(UnsupportedError, match=culprit):
        support.check_settings(options(**changed))


def test_the_start_up_line_states_mode_placement_and_backing(monkeypatch, caplog):
    with caplog.at_level(logging.INFO):
        returned_pool(monkeypatch)
    assert "mode return, placement pack, backing mmap" in caplog.text
