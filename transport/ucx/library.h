// The UCX library, loaded at run time: one binary serves machines with UCX and without it.
//
// Linked the ordinary way, UCX replaces sigaction() and mmap() in the whole program and installs
// hooks for malloc and handlers of signals while it loads. Loaded privately, with its environment
// prepared, it does none of that.
#pragma once

#include <ucp/api/ucp.h>

#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace baton::ucx {

// The calls that Baton makes, under their own names.
struct Library {
  decltype(&::ucp_get_version) ucp_get_version;
  decltype(&::ucp_config_read) ucp_config_read;
  decltype(&::ucp_config_modify) ucp_config_modify;
  decltype(&::ucp_config_release) ucp_config_release;
  decltype(&::ucp_init_version) ucp_init_version;
  decltype(&::ucp_cleanup) ucp_cleanup;
  decltype(&::ucp_worker_create) ucp_worker_create;
  decltype(&::ucp_worker_destroy) ucp_worker_destroy;
  decltype(&::ucp_worker_get_address) ucp_worker_get_address;
  decltype(&::ucp_worker_release_address) ucp_worker_release_address;
  decltype(&::ucp_worker_get_efd) ucp_worker_get_efd;
  decltype(&::ucp_worker_arm) ucp_worker_arm;
  decltype(&::ucp_worker_progress) ucp_worker_progress;
  decltype(&::ucp_worker_set_am_recv_handler) ucp_worker_set_am_recv_handler;
  decltype(&::ucp_ep_create) ucp_ep_create;
  decltype(&::ucp_ep_close_nbx) ucp_ep_close_nbx;
  decltype(&::ucp_am_send_nbx) ucp_am_send_nbx;
  decltype(&::ucp_request_check_status) ucp_request_check_status;
  decltype(&::ucp_request_free) ucp_request_free;
  decltype(&::ucs_status_string) ucs_status_string;

  // The installed library, loaded by the first call and kept. Unavailable, with the remedy, if no
  // usable one is installed, or if this release is known to end the process, which is checked
  // before it is loaded.
  static absl::StatusOr<const Library*> get();
  static absl::StatusOr<Library> load(const char* file);  // which get() asks for libucp.so.0
  // Whether it lives where the host has this name.
  static absl::Status survives_name(std::string_view host);
  std::string version() const;  // "1.13.1"

  // OK if workers may be made. Not in a process forked from one that had made some: the thread that
  // UCX depends on exists only in the parent.
  static absl::Status usable();
  static void use();  // from now on, in this process
};

// What we set the segments of UCX's software transports to. A longer message is put together from
// pieces there, at the price of an allocation. (Shared memory counts the bytes in 16 bits.)
inline constexpr size_t kSegmentBytes = 65280;

}  // namespace baton::ucx
