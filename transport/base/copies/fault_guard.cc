// The handler of SIGSEGV and SIGBUS, and the way back from it.
#include "transport/base/copies/fault_guard.h"

#include <ucontext.h>

#include <atomic>
#include <csetjmp>
#include <csignal>
#include <cstdlib>
#include <string_view>

namespace baton::base {
namespace {

// Of this thread: where a copy that faults goes on. Its place is fixed when the library is loaded:
// a handler could not make room for it.
__attribute__((tls_model("initial-exec"))) thread_local sigjmp_buf* way_out = nullptr;

struct sigaction segv_before, bus_before;

// As if this handler were not there.
void pass_on(int signal, siginfo_t* info, void* context) {
  const struct sigaction& before = signal == SIGBUS ? bus_before : segv_before;
  if ((before.sa_flags & SA_SIGINFO) != 0) return before.sa_sigaction(signal, info, context);
  const bool sent = info->si_code <= 0;  // by somebody: it does not come again by itself
  if (before.sa_handler == SIG_IGN && sent) return;
  if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
    return before.sa_handler(signal);
  }
  struct sigaction standard {};
  standard.sa_handler = SIG_DFL;
  sigaction(signal, &standard, nullptr);
  if (sent) raise(signal);
}

void on_fault(int signal, siginfo_t* info, void* context) {
  sigjmp_buf* const out = way_out;
  if (out == nullptr || info->si_code <= 0) return pass_on(signal, info, context);
  way_out = nullptr;
  // As it was there: whoever calls this handler, as the thread sanitizer does, may have blocked
  // more.
  pthread_sigmask(SIG_SETMASK, &static_cast<const ucontext_t*>(context)->uc_sigmask, nullptr);
  siglongjmp(*out, 1);
}

bool install() {
  const char* wanted = std::getenv("BATON_CATCH_FAULTS");
  if (wanted != nullptr && std::string_view(wanted) == "no") return false;
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  // Not held back while it runs: it does not return where it was called.
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigemptyset(&action.sa_mask);
  return sigaction(SIGSEGV, &action, &segv_before) == 0 &&
         sigaction(SIGBUS, &action, &bus_before) == 0;
}

}  // namespace

bool run_guarded(void (*copy)(const void*), const void* what) {
  static const bool caught = install();
  if (!caught) {
    copy(what);
    return true;
  }
  sigjmp_buf here;
  if (sigsetjmp(here, 0) != 0) return false;
  way_out = &here;
  std::atomic_signal_fence(std::memory_order_seq_cst);
  copy(what);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  way_out = nullptr;
  return true;
}

bool readable(const std::byte* data, size_t bytes) {
  if (bytes == 0) return true;
  return guarded([data, bytes] {
    (void)*static_cast<const volatile std::byte*>(data);
    (void)*static_cast<const volatile std::byte*>(data + bytes - 1);
  });
}

absl::Status source_is_gone() {
  return absl::FailedPreconditionError(
      "the memory of this transfer's source is not mapped any more: keep memory until the transfer "
      "has ended");
}

absl::Status target_is_gone() {
  return absl::FailedPreconditionError(
      "the memory of this transfer's target is not mapped for writing any more: keep memory until "
      "it is deregistered");
}

}  // namespace baton::base
