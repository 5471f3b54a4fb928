// Loading libucp and preparing the environment that it reads while it loads.
#include "transport/ucx/library.h"

#include <dlfcn.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdlib>
#include <deque>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace baton::ucx {
namespace {

std::atomic<pid_t> user{0};

// Sets options that UCX reads only from the environment; the user's values are kept. It replaces
// the environment's list instead of calling setenv(), which frees the list that other threads may
// be reading (getenv()).
void prepare_environment() {
  const std::string segment = absl::StrCat(kSegmentBytes);
  const std::pair<const char*, const char*> defaults[] = {
      {"UCX_MEM_EVENTS", "n"},  // no hooks: memory is registered explicitly
      {"UCX_MEM_MMAP_HOOK_MODE", "none"},
      {"UCX_MEM_MALLOC_HOOKS", "n"},
      {"UCX_MEM_MALLOC_RELOC", "n"},
      {"UCX_MEM_DYNAMIC_MMAP_THRESH", "n"},
      {"UCX_HANDLE_ERRORS", "none"},  // signals belong to the program
      {"UCX_DEBUG_SIGNO", "0"},
      {"UCX_LOG_LEVEL", "fatal"},  // errors are told as absl::Status
      {"UCX_WARN_UNUSED_ENV_VARS", "n"},
      {"UCX_TCP_MAX_CONN_RETRIES", "1"},  // 1.13 trips over its own states when it tries again
      {"UCX_TCP_TX_SEG_SIZE", segment.c_str()},
      {"UCX_TCP_RX_SEG_SIZE", segment.c_str()},
      {"UCX_POSIX_SEG_SIZE", segment.c_str()},
      {"UCX_SYSV_SEG_SIZE", segment.c_str()},
      {"UCX_POSIX_RX_BUFS_GROW", "64"},
      {"UCX_SYSV_RX_BUFS_GROW", "64"},
      {"UCX_POSIX_ERROR_HANDLING", "y"},
      {"UCX_SYSV_ERROR_HANDLING", "y"},
  };
  // Never freed: the environment has them for as long as the process lives.
  static auto& texts = *new std::deque<std::string>;
  static auto& lists = *new std::deque<std::vector<char*>>;
  std::vector<char*> all;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    all.push_back(*entry);
  }
  const size_t before = all.size();
  for (const auto& [name, value] : defaults) {
    if (std::getenv(name) != nullptr) continue;
    all.push_back(texts.emplace_back(absl::StrCat(name, "=", value)).data());
  }
  if (all.size() == before) return;
  all.push_back(nullptr);
  lists.push_back(std::move(all));
  std::atomic_ref(environ).store(lists.back().data(), std::memory_order_release);
}

}  // namespace

absl::Status Library::survives_name(std::string_view host) {
  // It reads the name into HOST_NAME_MAX bytes, as of 1.19, and relies on a zero behind it.
  if (host.size() < HOST_NAME_MAX) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("UCX aborts processes on a host whose name has ",
                                             HOST_NAME_MAX, " characters, like this one's (",
                                             std::string(host), "): give it a name of ",
                                             HOST_NAME_MAX - 1, " at most (`hostname NAME`)"));
}

absl::StatusOr<Library> Library::load(const char* file) {
  utsname here{};
  if (uname(&here) == 0) {
    if (absl::Status status = survives_name(here.nodename); !status.ok()) return status;
  }
  prepare_environment();
  void* handle = dlopen(file, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* why = dlerror();
    return absl::UnavailableError(absl::StrCat(
        "UCX cannot be loaded (", why != nullptr ? why : file, "): `apt-get install libucx0`"));
  }
  Library library;
  std::string missing;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
    if (function == nullptr) missing = name;
  };
#define BATON_UCX_FIND(name) find(library.name, #name)
  BATON_UCX_FIND(ucp_get_version);
  BATON_UCX_FIND(ucp_config_read);
  BATON_UCX_FIND(ucp_config_modify);
  BATON_UCX_FIND(ucp_config_release);
  BATON_UCX_FIND(ucp_init_version);
  BATON_UCX_FIND(ucp_cleanup);
  BATON_UCX_FIND(ucp_worker_create);
  BATON_UCX_FIND(ucp_worker_destroy);
  BATON_UCX_FIND(ucp_worker_get_address);
  BATON_UCX_FIND(ucp_worker_release_address);
  BATON_UCX_FIND(ucp_worker_get_efd);
  BATON_UCX_FIND(ucp_worker_arm);
  BATON_UCX_FIND(ucp_worker_progress);
  BATON_UCX_FIND(ucp_worker_set_am_recv_handler);
  BATON_UCX_FIND(ucp_ep_create);
  BATON_UCX_FIND(ucp_ep_close_nbx);
  BATON_UCX_FIND(ucp_am_send_nbx);
  BATON_UCX_FIND(ucp_request_check_status);
  BATON_UCX_FIND(ucp_request_free);
  BATON_UCX_FIND(ucs_status_string);
#undef BATON_UCX_FIND
  // UCX keeps its promises to programs built for an older minor version, not for a newer one.
  unsigned major = 0, minor = 0, release = 0;
  if (library.ucp_get_version != nullptr) library.ucp_get_version(&major, &minor, &release);
  if (major != UCP_API_MAJOR || minor < UCP_API_MINOR || !missing.empty()) {
    return absl::UnavailableError(absl::StrCat(
        "the installed UCX ", major, ".", minor, ".", release, " will not do",
        missing.empty() ? "" : absl::StrCat(", it lacks ", missing), ": this program needs ",
        UCP_API_MAJOR, ".", UCP_API_MINOR, " or a newer ", UCP_API_MAJOR,
        ".x; upgrade it (Debian: libucx0), or build against the headers of that version"));
  }
  return library;
}

absl::StatusOr<const Library*> Library::get() {
  static const absl::StatusOr<Library> library = load("libucp.so.0");
  if (!library.ok()) return library.status();
  return &*library;
}

std::string Library::version() const {
  unsigned major = 0, minor = 0, release = 0;
  ucp_get_version(&major, &minor, &release);
  return absl::StrCat(major, ".", minor, ".", release);
}

void Library::use() { user = getpid(); }

absl::Status Library::usable() {
  const pid_t other = user;
  if (other == 0 || other == getpid()) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("UCX was in use in process ", other,
                   " when this one was forked from it, and UCX does not support fork: fork before "
                   "the first connection over ucx, or exec another program"));
}

}  // namespace baton::ucx
