// Wrappers around libc's calls, found with dlsym(RTLD_NEXT).
#include "tests/hostile/failing_calls.h"

#include <dlfcn.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/uio.h>

#include <initializer_list>

#include "tests/std.h"

// By the linker.
extern "C" const char __executable_start, etext;  // NOLINT(readability-identifier-naming)

namespace baton::hostile {
namespace {

struct State {
  bool armed = false;
  size_t which = 0;
  size_t flavour = 0;
  size_t more = 0;  // of the same call, after that one
  size_t calls = 0;
  std::string_view name;
  std::string failed;
  // Edge-triggered descriptors: the kernel rings again after a call that it cut short or refused
  // for want of room, so these wrappers do.
  std::map<int, std::pair<int, epoll_event>> watched;
};
State& state() {
  thread_local State state;
  return state;
}

constexpr int kShort = -1;  // less than was asked for, rather than an error
constexpr std::initializer_list<int> kWaysOfSends = {ECONNRESET, EINTR, kShort, EAGAIN,
                                                     ENOBUFS,    EPIPE, ENOMEM};
constexpr std::initializer_list<int> kWaysOfReceives = {ECONNRESET, EINTR,  kShort,
                                                        EAGAIN,     ENOMEM, ETIMEDOUT};

// Whether a function of this program made the call. What libraries such as UCX make of failures
// inside them is not ours to promise.
bool ours(const void* caller) { return caller >= &__executable_start && caller < &etext; }

// 0: the call is to go on; otherwise the error with which it is to fail, or kShort.
int verdict(const void* caller, const char* name, std::initializer_list<int> ways) {
  State& now = state();
  if (!now.armed || !ours(caller)) return 0;
  const bool again = now.more > 0 && name == now.name;
  if (++now.calls != now.which && !again) return 0;
  if (again) --now.more;
  now.name = name;
  const int way = ways.begin()[now.flavour % ways.size()];
  now.failed = std::string(name) + " " + (way == kShort ? "short" : strerrorname_np(way));
  return way;
}

template <typename Result>
Result fail_with(int error, Result result) {
  errno = error;
  return result;
}

void ring_again(int fd) {
  const auto found = state().watched.find(fd);
  if (found == state().watched.end()) return;
  auto [poller, event] = found->second;
  epoll_ctl(poller, EPOLL_CTL_MOD, fd, &event);
}

// Makes a call that sends or receives: of all that was asked for, or of a byte of it.
template <typename Call>
ssize_t transfer(int fd, int error, const Call& call) {
  if (error == 0) return call(true);
  if (error != kShort) {
    if (error == EAGAIN) ring_again(fd);
    return fail_with(error, ssize_t{-1});
  }
  const ssize_t moved = call(false);
  ring_again(fd);
  return moved;
}

// One byte of what was asked for.
msghdr one_byte(const msghdr& message, iovec& first) {
  msghdr out = message;
  for (size_t i = 0; i < message.msg_iovlen; ++i) {
    if (message.msg_iov[i].iov_len == 0) continue;
    first = {message.msg_iov[i].iov_base, 1};
    out.msg_iov = &first;
    out.msg_iovlen = 1;
    break;
  }
  return out;
}

bool plain_file(int fd) {
  struct stat file {};
  return fstat(fd, &file) == 0 && S_ISREG(file.st_mode);
}

bool stream(int fd) {
  int type = 0;
  socklen_t size = sizeof type;
  return getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) == 0 && type == SOCK_STREAM;
}

}  // namespace

void arm(size_t which, size_t flavour, size_t more) {
  State& now = state();
  now.more = more;
  now.name = {};
  now.which = which;
  now.flavour = flavour;
  now.calls = 0;
  now.failed.clear();
  now.armed = true;
}

size_t disarm() {
  state().armed = false;
  return state().calls;
}

const std::string& what_failed() { return state().failed; }

}  // namespace baton::hostile

// The real one.
#define REAL(name) \
  static const auto real = reinterpret_cast<decltype(&::name)>(dlsym(RTLD_NEXT, #name))

#define CALLER __builtin_return_address(0)

using baton::hostile::fail_with;
using baton::hostile::kShort;
using baton::hostile::kWaysOfReceives;
using baton::hostile::kWaysOfSends;
using baton::hostile::one_byte;
using baton::hostile::plain_file;
using baton::hostile::ring_again;
using baton::hostile::state;
using baton::hostile::stream;
using baton::hostile::transfer;
using baton::hostile::verdict;

extern "C" {

int socket(int domain, int type, int protocol) {
  REAL(socket);
  const int error = verdict(CALLER, "socket", {EMFILE, ENFILE, ENOBUFS, ENOMEM, EAFNOSUPPORT});
  return error != 0 ? fail_with(error, -1) : real(domain, type, protocol);
}

int bind(int fd, const sockaddr* address, socklen_t size) noexcept {
  REAL(bind);
  const int error = verdict(CALLER, "bind", {EADDRINUSE, EADDRNOTAVAIL, ENOMEM, EACCES});
  return error != 0 ? fail_with(error, -1) : real(fd, address, size);
}

int listen(int fd, int backlog) noexcept {
  REAL(listen);
  const int error = verdict(CALLER, "listen", {EADDRINUSE, ENOBUFS});
  return error != 0 ? fail_with(error, -1) : real(fd, backlog);
}

int connect(int fd, const sockaddr* address, socklen_t size) {
  REAL(connect);
  const bool tcp = stream(fd);
  const int error =
      tcp ? verdict(CALLER, "connect",
                    {EADDRNOTAVAIL, ETIMEDOUT, ENETUNREACH, EHOSTUNREACH, ENOBUFS, ECONNRESET})
          : verdict(CALLER, "connect", {EAGAIN, EINTR, ENOMEM});
  return error != 0 ? fail_with(error, -1) : real(fd, address, size);
}

int accept4(int fd, sockaddr* address, socklen_t* size, int flags) {
  REAL(accept4);
  const int error =
      verdict(CALLER, "accept4", {EMFILE, ENFILE, EINTR, ECONNABORTED, ENOMEM, ENOBUFS, EPERM});
  return error != 0 ? fail_with(error, -1) : real(fd, address, size, flags);
}

ssize_t send(int fd, const void* data, size_t bytes, int flags) {
  REAL(send);
  const int error = verdict(CALLER, "send", kWaysOfSends);
  return transfer(fd, error, [&](bool all) {
    return real(fd, data, all ? bytes : std::min<size_t>(bytes, 1), flags);
  });
}

ssize_t sendmsg(int fd, const msghdr* message, int flags) {
  REAL(sendmsg);
  const int error =
      verdict(CALLER, "sendmsg",
              stream(fd) ? kWaysOfSends
                         : std::initializer_list<int>{ECONNRESET, EINTR, EAGAIN, ENOBUFS,
                                                      ETOOMANYREFS, EPIPE, ENOMEM});
  return transfer(fd, error, [&](bool all) {
    iovec first{};
    const msghdr one = one_byte(*message, first);
    return real(fd, all ? message : &one, flags);
  });
}

ssize_t recv(int fd, void* data, size_t bytes, int flags) {
  REAL(recv);
  const int error = verdict(CALLER, "recv", kWaysOfReceives);
  return transfer(fd, error, [&](bool all) {
    return real(fd, data, all ? bytes : std::min<size_t>(bytes, 1), flags);
  });
}

ssize_t recvmsg(int fd, msghdr* message, int flags) {
  REAL(recvmsg);
  const int error = verdict(
      CALLER, "recvmsg",
      stream(fd) ? kWaysOfReceives : std::initializer_list<int>{ECONNRESET, EINTR, EAGAIN, ENOMEM});
  return transfer(fd, error, [&](bool all) {
    if (all) return real(fd, message, flags);
    iovec first{};
    msghdr one = one_byte(*message, first);
    const ssize_t got = real(fd, &one, flags);
    message->msg_flags = one.msg_flags;
    return got;
  });
}

int epoll_create1(int flags) noexcept {
  REAL(epoll_create1);
  const int error = verdict(CALLER, "epoll_create1", {EMFILE, ENFILE, ENOMEM});
  return error != 0 ? fail_with(error, -1) : real(flags);
}

int epoll_ctl(int poller, int what, int fd, epoll_event* event) noexcept {
  REAL(epoll_ctl);
  if (what == EPOLL_CTL_ADD) {
    const int error = verdict(CALLER, "epoll_ctl", {ENOMEM, ENOSPC});
    if (error != 0) return fail_with(error, -1);
    if ((event->events & EPOLLET) != 0) state().watched[fd] = {poller, *event};
  }
  if (what == EPOLL_CTL_DEL) state().watched.erase(fd);
  return real(poller, what, fd, event);
}

int epoll_wait(int poller, epoll_event* events, int most, int timeout) {
  REAL(epoll_wait);
  const int error = verdict(CALLER, "epoll_wait", {EINTR, kShort});
  if (error == kShort) return real(poller, events, 1, timeout);
  return error != 0 ? fail_with(error, -1) : real(poller, events, most, timeout);
}

int eventfd(unsigned int count, int flags) noexcept {
  REAL(eventfd);
  const int error = verdict(CALLER, "eventfd", {EMFILE, ENFILE, ENOMEM});
  return error != 0 ? fail_with(error, -1) : real(count, flags);
}

ssize_t read(int fd, void* data, size_t bytes) {
  REAL(read);
  if (plain_file(fd)) return real(fd, data, bytes);  // which nothing interrupts
  const int error = verdict(CALLER, "read", {EINTR});
  return error != 0 ? fail_with(error, ssize_t{-1}) : real(fd, data, bytes);
}

ssize_t write(int fd, const void* data, size_t bytes) {
  REAL(write);
  const int error = verdict(CALLER, "write", {EINTR});
  return error != 0 ? fail_with(error, ssize_t{-1}) : real(fd, data, bytes);
}

void* mmap(void* at, size_t bytes, int protection, int flags, int fd, off_t offset) noexcept {
  REAL(mmap);
  const int error = verdict(CALLER, "mmap", {ENOMEM, EAGAIN, ENFILE});
  return error != 0 ? fail_with(error, MAP_FAILED) : real(at, bytes, protection, flags, fd, offset);
}

int memfd_create(const char* name, unsigned int flags) noexcept {
  REAL(memfd_create);
  const int error = verdict(CALLER, "memfd_create", {EMFILE, ENFILE, ENOMEM, ENOSYS});
  return error != 0 ? fail_with(error, -1) : real(name, flags);
}

int ftruncate(int fd, off_t bytes) noexcept {
  REAL(ftruncate);
  const int error = verdict(CALLER, "ftruncate", {EFBIG, EINTR, EPERM});
  return error != 0 ? fail_with(error, -1) : real(fd, bytes);
}

int setsockopt(int fd, int level, int name, const void* value, socklen_t size) noexcept {
  REAL(setsockopt);
  const int error = verdict(CALLER, "setsockopt", {ENOMEM, ENOPROTOOPT});
  return error != 0 ? fail_with(error, -1) : real(fd, level, name, value, size);
}

ssize_t process_vm_readv(pid_t process, const iovec* to, unsigned long parts, const iovec* from,
                         unsigned long from_parts, unsigned long flags) noexcept {
  REAL(process_vm_readv);
  const int error = verdict(CALLER, "process_vm_readv", {ENOMEM, EPERM, ESRCH, EFAULT});
  return error != 0 ? fail_with(error, ssize_t{-1})
                    : real(process, to, parts, from, from_parts, flags);
}

ssize_t process_vm_writev(pid_t process, const iovec* from, unsigned long parts, const iovec* to,
                          unsigned long to_parts, unsigned long flags) noexcept {
  REAL(process_vm_writev);
  const int error = verdict(CALLER, "process_vm_writev", {ENOMEM, EPERM, ESRCH, EFAULT});
  return error != 0 ? fail_with(error, ssize_t{-1})
                    : real(process, from, parts, to, to_parts, flags);
}

}  // extern "C"
