// How quick a plugin is: steps of NCCL's proxies between two processes, over Baton's plugin, the
// Socket-style reference and whatever else is named, beside one plain TCP stream; in turns.
//
//   nccl_net_bench [--bytes=65536] [--steps=20000] [--rounds=3] [NAME=PLUGIN.so[:PROVIDERS]]...
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>

#include "tests/nccl_net/any_net.h"

namespace baton::nccl {
namespace {

using Clock = std::chrono::steady_clock;

struct Plan {
  size_t bytes = 64 << 10;
  size_t steps = 20'000;
  int rounds = 3;
};
constexpr size_t kPlaces = 8, kWarmUp = 500;

void check(Result result, const char* what) {
  if (result == Result::kSuccess) return;
  std::fprintf(stderr, "%s: %d\n", what, static_cast<int>(result));
  for (const std::string& line : NetLog::lines(LogLevel::kWarn)) {
    std::fprintf(stderr, "  %s\n", line.c_str());
  }
  _exit(1);
}

AnyNet open(const std::string& path) {
  absl::StatusOr<AnyNet> net = AnyNet::load(path);
  if (!net.ok()) {
    std::fprintf(stderr, "%s\n", net.status().ToString().c_str());
    _exit(1);
  }
  check(net->init(), "init");
  int devices = 0;
  check(net->devices(&devices), "devices");
  return *std::move(net);
}

std::byte* pages(size_t bytes) {
  void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  std::memset(at, 1, bytes);
  return static_cast<std::byte*>(at);
}

// Eight steps in flight, the oldest is tested: what a proxy does.
template <typename Post>
double drive(AnyNet& net, const Plan& plan, const Post& post) {
  std::array<void*, kPlaces> requests{};
  size_t posted = 0, done = 0;
  Clock::time_point begin;
  const size_t all = plan.steps + kWarmUp;
  while (done < all) {
    if (posted < all && posted - done < kPlaces) {
      void* request = nullptr;
      check(post(posted % kPlaces, &request), "post");
      if (request != nullptr) requests[posted++ % kPlaces] = request;
    }
    if (posted == done) continue;
    int over = 0, size = 0;
    check(net.test(requests[done % kPlaces], &over, &size), "test");
    if (over == 0) continue;
    if (++done == kWarmUp) begin = Clock::now();
  }
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Seconds for the steps, as the receiver saw them.
double run(const std::string& library, const Plan& plan) {
  int handles[2], times[2];
  if (pipe(handles) != 0 || pipe(times) != 0) return 0;
  const pid_t receiver = fork();
  if (receiver == 0) {
    AnyNet net = open(library);
    std::array<char, kHandleBytes> handle{};
    void *listener = nullptr, *comm = nullptr, *memory = nullptr;
    check(net.listen(0, handle.data(), &listener), "listen");
    if (write(handles[1], handle.data(), handle.size()) < 0) _exit(1);
    while (comm == nullptr) check(net.accept(listener, &comm), "accept");
    std::byte* const data = pages(plan.bytes * kPlaces);
    check(net.register_memory(comm, data, plan.bytes * kPlaces, &memory), "regMr");
    const double seconds = drive(net, plan, [&](size_t place, void** request) {
      void* at = data + place * plan.bytes;
      size_t size = plan.bytes;
      int tag = 0;
      return net.receive(comm, 1, &at, &size, &tag, &memory, request);
    });
    if (write(times[1], &seconds, sizeof seconds) < 0) _exit(1);
    check(net.deregister(comm, memory), "deregMr");
    check(net.close_receive(comm), "closeRecv");
    _exit(0);
  }
  const pid_t sender = fork();
  if (sender == 0) {
    AnyNet net = open(library);
    std::array<char, kHandleBytes> handle{};
    if (read(handles[0], handle.data(), handle.size()) < 0) _exit(1);
    void *comm = nullptr, *memory = nullptr;
    while (comm == nullptr) check(net.connect(0, handle.data(), &comm), "connect");
    std::byte* const data = pages(plan.bytes * kPlaces);
    check(net.register_memory(comm, data, plan.bytes * kPlaces, &memory), "regMr");
    drive(net, plan, [&](size_t place, void** request) {
      return net.send(comm, data + place * plan.bytes, plan.bytes, 0, memory, request);
    });
    usleep(20'000);  // the receiver tests its last ones
    _exit(0);
  }
  for (const int end : {handles[0], handles[1], times[1]}) close(end);
  double seconds = 0;
  if (read(times[0], &seconds, sizeof seconds) != sizeof seconds) seconds = -1;
  close(times[0]);
  waitpid(receiver, nullptr, 0);
  waitpid(sender, nullptr, 0);
  return seconds;
}

// One TCP stream over loopback, blocking, both ends in processes of their own.
double stream(const Plan& plan) {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof at;
  if (bind(listener, reinterpret_cast<sockaddr*>(&at), size) != 0 || listen(listener, 1) != 0 ||
      getsockname(listener, reinterpret_cast<sockaddr*>(&at), &size) != 0) {
    return -1;
  }
  const size_t all = plan.bytes * (plan.steps + kWarmUp);
  const pid_t sender = fork();
  if (sender == 0) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(fd, reinterpret_cast<sockaddr*>(&at), sizeof at) != 0) _exit(1);
    std::byte* const data = pages(plan.bytes);
    for (size_t sent = 0; sent < all;) {
      const ssize_t n = send(fd, data, std::min(plan.bytes, all - sent), 0);
      if (n <= 0) _exit(1);
      sent += static_cast<size_t>(n);
    }
    _exit(0);
  }
  const int fd = accept(listener, nullptr, nullptr);
  std::byte* const data = pages(plan.bytes * kPlaces);
  Clock::time_point begin;
  for (size_t got = 0, warm = plan.bytes * kWarmUp; got < all;) {
    const ssize_t n = recv(fd, data + got % (plan.bytes * kPlaces) / plan.bytes * plan.bytes,
                           plan.bytes - got % plan.bytes, 0);
    if (n <= 0) break;
    if (got < warm && got + static_cast<size_t>(n) >= warm) begin = Clock::now();
    got += static_cast<size_t>(n);
  }
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  close(fd);
  close(listener);
  waitpid(sender, nullptr, 0);
  munmap(data, plan.bytes * kPlaces);
  return seconds;
}

struct Contender {
  std::string name, library, providers;
  std::vector<double> seconds;
  double median() {
    std::sort(seconds.begin(), seconds.end());
    return seconds[seconds.size() / 2];
  }
};

int main_of(int argc, char** argv) {
  Plan plan;
  std::vector<Contender> all = {{"stream floor", "", "", {}},
                                {"socket reference", BATON_SOCKET_REFERENCE, "", {}},
                                {"baton shm", BATON_NCCL_PLUGIN, "shm", {}},
                                {"baton tcp", BATON_NCCL_PLUGIN, "tcp", {}}};
  for (int i = 1; i < argc; ++i) {
    const std::string text = argv[i];
    const size_t equals = text.find('=');
    const std::string name = text.substr(0, equals), value = text.substr(equals + 1);
    if (name == "--bytes") {
      plan.bytes = std::stoul(value);
    } else if (name == "--steps") {
      plan.steps = std::stoul(value);
    } else if (name == "--rounds") {
      plan.rounds = std::stoi(value);
    } else {
      const size_t colon = value.rfind(':');
      all.push_back({name,
                     value.substr(0, colon),
                     colon == std::string::npos ? "" : value.substr(colon + 1),
                     {}});
    }
  }
  for (int round = 0; round < plan.rounds; ++round) {
    for (Contender& contender : all) {
      setenv("BATON_NCCL_PROVIDERS", contender.providers.c_str(), 1);
      contender.seconds.push_back(contender.library.empty() ? stream(plan)
                                                            : run(contender.library, plan));
    }
  }
  const double floor = all[0].median(), reference = all[1].median();
  std::printf("%zu bytes, %zu steps, eight in flight, two processes; median of %d rounds\n",
              plan.bytes, plan.steps, plan.rounds);
  std::printf("%-18s %10s %8s %12s %10s\n", "", "us/step", "GB/s", "of reference", "of floor");
  for (Contender& contender : all) {
    const double seconds = contender.median();
    std::printf("%-18s %10.2f %8.2f %12.2f %10.2f\n", contender.name.c_str(),
                seconds / static_cast<double>(plan.steps) * 1e6,
                static_cast<double>(plan.bytes * plan.steps) / seconds / 1e9, reference / seconds,
                floor / seconds);
  }
  return 0;
}

}  // namespace
}  // namespace baton::nccl

int main(int argc, char** argv) { return baton::nccl::main_of(argc, argv); }
