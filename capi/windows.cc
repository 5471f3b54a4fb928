// The C interface: windows.
#include <map>
#include <memory>
#include <mutex>

#include "absl/strings/str_format.h"
#include "capi/comm_handle.h"
#include "collectives/window.h"

using baton::CallOptions;
using baton::Window;
using baton::Work;
using namespace baton::capi;

struct baton_window {
  const baton_comm* comm = nullptr;  // used only by what the library starts: it knows its end
  std::unique_ptr<Window> window;
  std::mutex mutex;
  std::map<int32_t, baton::RemoteView> views;  // that were given out
};

namespace {

// body(window)
template <typename Body>
int32_t with_window(const baton_window* handle, baton_error* error, Body&& body) {
  if (handle == nullptr) {
    return invalid("window is NULL: pass what baton_window_create() made", error);
  }
  return caught(error, [&] { return body(*handle->window); });
}

absl::StatusOr<Work> start(Window& window, const baton_access& access, const CallOptions& options) {
  switch (access.kind) {
    case BATON_PUT:
      return access.value == 0
                 ? window.put(access.data, access.bytes, access.rank, access.offset, options)
                 : window.put_signal(access.data, access.bytes, access.rank, access.offset,
                                     access.slot, access.value, options);
    case BATON_GET:
      return window.get(access.data, access.bytes, access.rank, access.offset, options);
    case BATON_SIGNAL:
      return window.signal(access.rank, access.slot, access.value, options);
    case BATON_WAIT_SIGNAL:
      return window.wait_signal(access.rank, access.slot, access.value, options);
    case BATON_FLUSH:
      return window.flush(access.rank, options);
    default:
      return absl::InvalidArgumentError(absl::StrFormat(
          "kind %d is not one that this library knows: see baton_access_kind", access.kind));
  }
}

}  // namespace

extern "C" {

int32_t baton_window_create(baton_comm* comm, void* data, uint64_t bytes, uint32_t signals,
                            int64_t timeout, baton_window** out, baton_error* error) {
  if (!cleared(out)) return invalid(kNoHandle, error);
  return with(comm, error, [&](baton::Communicator& group) {
    baton::WindowOptions options;
    options.signals = signals;
    set_time(timeout, options.timeout);
    auto made = data == nullptr && bytes > 0 ? Window::allocate(group, bytes, options)
                                             : Window::create(group, data, bytes, options);
    if (!made.ok()) return ended(made.status());
    auto handle = std::make_unique<baton_window>();
    handle->comm = comm;
    handle->window = *std::move(made);
    *out = handle.release();
    return absl::OkStatus();
  });
}

void baton_window_destroy(baton_window* window) { delete window; }

int32_t baton_window_start(baton_window* window, const baton_access* access, baton_work* work,
                           baton_error* error) {
  give_nothing(work);
  baton_access all = BATON_ACCESS_INIT;
  if (!read_sized(access, all)) {
    return invalid("access: set it to BATON_ACCESS_INIT first", error);
  }
  return with_window(window, error, [&](Window& of) {
    return start_call(*window->comm, {all.timeout, all.flags, all.on_end, all.context}, work, error,
                      [&](const CallOptions& options) { return start(of, all, options); });
  });
}

int32_t baton_window_signal_value(const baton_window* window, int32_t from, uint32_t slot,
                                  uint64_t* value, baton_error* error) {
  if (!cleared(value)) return invalid("value is NULL: pass the address for the number", error);
  return with_window(window, error, [&](Window& of) {
    const auto is = of.signal_value(from, slot);
    if (is.ok()) *value = *is;
    return is.status();
  });
}

int32_t baton_window_bytes(const baton_window* window, int32_t rank, uint64_t* bytes,
                           baton_error* error) {
  if (!cleared(bytes)) return invalid("bytes is NULL: pass the address for the number", error);
  return with_window(window, error, [&](Window& of) { *bytes = of.bytes(rank); });
}

int32_t baton_window_view(baton_window* window, int32_t rank, const void** data, uint64_t* bytes,
                          baton_error* error) {
  if (data == nullptr || bytes == nullptr) {
    return invalid("data or bytes is NULL: pass the addresses for both", error);
  }
  *data = nullptr;
  *bytes = 0;
  return with_window(window, error, [&](Window& of) {
    auto view = of.view(rank);
    if (!view.ok()) return view.status();
    *data = view->data;
    *bytes = view->size;
    std::lock_guard lock(window->mutex);
    window->views.try_emplace(rank, *std::move(view));
    return absl::OkStatus();
  });
}

}  // extern "C"
