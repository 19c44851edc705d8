"""Where the scheduler lets `control.py` act: before it chooses a batch, while it is idle, and over HTTP.

The hooks do nothing for a server with another cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radix_pages_sglang.control import MemoryControl

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_WEIGHT_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_UPDATE_HANDLERS = (
    "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController._update_handlers"
)


def register() -> None:
    """Register the hooks; SGLang applies them when all plugins are loaded."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_SCHEDULER}.get_next_batch_to_run", _step, HookType.BEFORE)
    HookRegistry.register(f"{_SCHEDULER}._poll_timeout_aborts", _add_decisions, HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULER}.init_request_dispatcher", _dispatch_idle_trims, HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULER}.maybe_sleep_on_idle", _sleep, HookType.AROUND)
    HookRegistry.register(_UPDATE_HANDLERS, _add_knobs, HookType.AFTER)
    HookRegistry.register(f"{_WEIGHT_UPDATER}.release_memory_occupation", _release, HookType.AROUND)


def control_of(scheduler) -> MemoryControl | None:
    """What keeps this scheduler's memory, or None for another cache or none yet."""
    return getattr(getattr(scheduler, "tree_cache", None), "control", None)


def _step(scheduler, *args, **kwargs) -> None:
    if (control := control_of(scheduler)) is not None:
        control.step()


def _add_decisions(local_requests, scheduler):
    """On the rank that hands input to the others, once an iteration: what it decides rides along like a request."""
    control = control_of(scheduler)
    if control is None:
        return local_requests
    if control.watches_idleness and control.is_idle_trim_due(scheduler.is_fully_idle()):
        from radix_pages_sglang.control import IdleTrim

        local_requests = [*local_requests, IdleTrim()]
    if control.has_ceiling:
        local_requests = [*local_requests, *_hopeless(scheduler, control)]
    return local_requests


def _hopeless(scheduler, control: MemoryControl) -> list:
    """Aborts for requests that would wait for ever, because a ceiling was lowered after they were let in: the one
    that is prefilled chunk by chunk, and the first that waits."""
    from sglang.srt.managers.io_struct import AbortReq

    message = "The ceiling on KV memory was lowered; this request does not fit below it."
    reason = {"type": "abort", "status_code": 503, "message": message}
    return [
        AbortReq(rid=request.rid, abort_message=message, finished_reason=reason)
        for request in (scheduler.chunked_req, *scheduler.waiting_queue[:1])
        if request is not None
        and request.to_finish is None
        and not control.fits_alone(len(request.origin_input_ids) + len(request.output_ids))
    ]


def _sleep(sleep, scheduler):
    """A trim that goes on in slices keeps an idle scheduler awake."""
    control = control_of(scheduler)
    if control is None or not control.is_working:
        sleep(scheduler)


def _dispatch_idle_trims(_, scheduler):
    from sglang.utils import TypeBasedDispatcher

    from radix_pages_sglang.control import IdleTrim

    def trim(_: IdleTrim) -> None:
        if (control := control_of(scheduler)) is not None:
            control.trim()

    scheduler._request_dispatcher += TypeBasedDispatcher([(IdleTrim, trim)])


def _add_knobs(handlers, controller):
    """Our numbers among those that `/set_internal_state` takes; a refusal is logged by SGLang and answered False."""
    control = control_of(controller.scheduler)
    if control is None:
        return handlers
    from sglang.srt.managers.scheduler_components.internal_state import UpdateRejected, _UpdateHandler

    from radix_pages_sglang.knobs import MAX_RESIDENT_BYTES

    knobs = control.knobs()

    def validate(name: str, value: object) -> None:
        if complaint := knobs[name].complaint(name, value):
            raise UpdateRejected(complaint)

    def apply(name: str, value: float) -> None:
        control.set(name, value)
        if name == MAX_RESIDENT_BYTES:
            for request in controller.scheduler.waiting_queue:  # a smaller pool allows shorter answers
                controller.scheduler.init_req_max_new_tokens(request)

    return handlers | {name: _UpdateHandler(validate, apply) for name in knobs}


def _release(release, updater, request):
    """`/release_memory_occupation` flushes the cache of an idle server; what is empty then goes back at once."""
    control = control_of(updater.scheduler)
    if control is None:
        return release(updater, request)
    with _device_module_of(updater.scheduler.token_to_kv_pool_allocator.device):
        result = release(updater, request)
    control.trim()
    return result


@contextmanager
def _device_module_of(device: str) -> Iterator[None]:
    """On a CPU SGLang would wait for a CUDA device here, whenever torch was built for one, and end the server."""
    import torch

    if device != "cpu":
        yield
        return
    get_device_module = torch.get_device_module
    torch.get_device_module = lambda device="cpu": get_device_module(device)
    try:
        yield
    finally:
        torch.get_device_module = get_device_module
