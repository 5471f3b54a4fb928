// The handler of SIGSEGV and SIGBUS, and the way back from it.
#include "transport/base/copies/fault_guard.h"

#include <dlfcn.h>
#include <ucontext.h>

#include <atomic>
#include <csetjmp>
#include <csignal>
#include <cstdlib>
#include <string_view>

#ifndef SS_AUTODISARM  // of the kernel's header, which does not go with the library's
#define SS_AUTODISARM (1U << 31)
#endif

namespace baton::base {
namespace {

struct WayOut {
  sigjmp_buf to;
  stack_t signals{};  // the program's alternate stack
};
// Where this thread continues after a copy that faults. Static TLS, allocated when the library is
// loaded: a signal handler could not allocate it.
__attribute__((tls_model("initial-exec"))) thread_local WayOut* way_out = nullptr;
// The signals get through to this thread.
__attribute__((tls_model("initial-exec"))) thread_local bool this_thread_is_ready = false;

// The program's own handlers, from before ours.
struct Before {
  struct sigaction action {};
  std::atomic<bool> spent{false};  // SA_RESETHAND: it has had its one call
};
Before segv_before, bus_before;

// As if this handler were not there: the kernel's part of calling one included.
void pass_on(int signal, siginfo_t* info, void* context) {
  Before& of_signal = signal == SIGBUS ? bus_before : segv_before;
  const struct sigaction& before = of_signal.action;
  const bool sent = info->si_code <= 0;  // by a process: it does not come again by itself
  const bool informed = (before.sa_flags & SA_SIGINFO) != 0;
  if (!informed && before.sa_handler == SIG_IGN && sent) return;
  const bool handled = informed || (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN);
  const bool once = (before.sa_flags & SA_RESETHAND) != 0;
  if (handled && !(once && of_signal.spent.exchange(true))) {
    sigset_t held = before.sa_mask;
    if ((before.sa_flags & SA_NODEFER) == 0) sigaddset(&held, signal);
    pthread_sigmask(SIG_BLOCK, &held, nullptr);  // until it returns
    return informed ? before.sa_sigaction(signal, info, context) : before.sa_handler(signal);
  }
  struct sigaction standard {};
  standard.sa_handler = SIG_DFL;
  sigaction(signal, &standard, nullptr);
  if (sent) raise(signal);
}

void on_fault(int signal, siginfo_t* info, void* context) {
  WayOut* const out = way_out;
  if (out == nullptr || info->si_code <= 0) return pass_on(signal, info, context);
  way_out = nullptr;
  const auto& there = *static_cast<const ucontext_t*>(context);
  out->signals = there.uc_stack;
  // As it was there: whoever calls this handler, as the thread sanitizer does, may have blocked
  // more.
  pthread_sigmask(SIG_SETMASK, &there.uc_sigmask, nullptr);
  siglongjmp(out->to, 1);
}

// A signal that is held back while it is raised by a fault ends the process, handler or not.
void let_through() {
  sigset_t both;
  sigemptyset(&both);
  sigaddset(&both, SIGSEGV);
  sigaddset(&both, SIGBUS);
  pthread_sigmask(SIG_UNBLOCK, &both, nullptr);
}

// The library that this code is in stays when the program unloads it: the handler does.
void stay_loaded() {
  Dl_info here;
  if (dladdr(reinterpret_cast<const void*>(&on_fault), &here) == 0) return;
  (void)dlopen(here.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
}

bool install() {
  const char* wanted = std::getenv("BATON_CATCH_FAULTS");
  if (wanted != nullptr && std::string_view(wanted) == "no") return false;
  stay_loaded();
  // Known before the handler may have to pass on to it.
  sigaction(SIGSEGV, nullptr, &segv_before.action);
  sigaction(SIGBUS, nullptr, &bus_before.action);
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  // Not held back while it runs: it does not return where it was called.
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigemptyset(&action.sa_mask);
  return sigaction(SIGSEGV, &action, nullptr) == 0 && sigaction(SIGBUS, &action, nullptr) == 0;
}

}  // namespace

bool run_guarded(void (*copy)(const void*), const void* what) {
  static const bool caught = install();
  if (!caught) {
    copy(what);
    return true;
  }
  if (!this_thread_is_ready) {
    let_through();
    this_thread_is_ready = true;
  }
  WayOut here;
  if (sigsetjmp(here.to, 0) != 0) {
    // One that the kernel takes away for the time of a handler comes back when that returns.
    if ((static_cast<unsigned>(here.signals.ss_flags) & SS_AUTODISARM) != 0)
      sigaltstack(&here.signals, nullptr);
    return false;
  }
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
      "the memory of this transfer's source is no longer mapped: keep memory mapped until the "
      "transfer has ended");
}

absl::Status target_is_gone() {
  return absl::FailedPreconditionError(
      "the memory of this transfer's target is no longer mapped for writing: keep memory mapped "
      "until it is deregistered");
}

}  // namespace baton::base
