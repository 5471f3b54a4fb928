// The UCX baseline of `baton kv_bw`: runs ucx_perftest over TCP and reads its result.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "bench/kv/floors.h"
#include "bench/report/child_process.h"

namespace baton::bench {
namespace {

constexpr Time kLimit = std::chrono::seconds(20);
constexpr int kAttempts = 3;  // its server sometimes resets the connection

// A port of the loopback interface that no process uses at the moment; 0 when there is none.
uint16_t free_port() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof at;
  const bool good = fd >= 0 && bind(fd, reinterpret_cast<sockaddr*>(&at), size) == 0 &&
                    getsockname(fd, reinterpret_cast<sockaddr*>(&at), &size) == 0;
  if (fd >= 0) close(fd);
  return good ? ntohs(at.sin_port) : 0;
}

// Whether a socket listens on the port; connecting to find out would use up the server.
bool listening(uint16_t port) {
  const std::string local = absl::StrFormat(":%04X", port);
  for (const char* path : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream table(path);
    std::string line, slot, address, peer, state;
    std::getline(table, line);
    while (table >> slot >> address >> peer >> state && std::getline(table, line)) {
      if (state == "0A" && address.size() > 5 && address.substr(address.size() - 5) == local) {
        return true;
      }
    }
  }
  return false;
}

// GB/s from the last line of its CSV, whose last column is messages per second overall.
absl::StatusOr<double> parse(const std::string& output, size_t message_bytes) {
  std::vector<std::string> lines = absl::StrSplit(output, '\n', absl::SkipEmpty());
  if (!lines.empty()) {
    const std::vector<std::string> columns = absl::StrSplit(lines.back(), ',');
    double rate = 0;
    if (columns.size() == 8 && absl::SimpleAtod(columns.back(), &rate) && rate > 0) {
      return rate * static_cast<double>(message_bytes) * 1e-9;
    }
  }
  return absl::InternalError("ucx_perftest printed something unexpected");
}

absl::StatusOr<double> attempt(const std::vector<std::string>& test, size_t message_bytes,
                               Cores cores) {
  const std::vector<std::pair<std::string, std::string>> environment = {{"UCX_TLS", "tcp"},
                                                                        {"UCX_NET_DEVICES", "lo"}};
  const uint16_t port = free_port();
  auto server =
      ChildProcess::spawn(cores.target, {"ucx_perftest", "-p", absl::StrCat(port)}, environment);
  if (!server.ok()) return server.status();
  for (int i = 0; i < 300 && !listening(port); ++i) {
    if (const auto ended = server->wait(std::chrono::milliseconds(10)); ended.ok()) {
      if (*ended != 127) return absl::UnavailableError("its server exited at once");
      return absl::NotFoundError("ucx_perftest is not installed (Debian: ucx-utils)");
    }
  }
  std::vector<std::string> client = {"ucx_perftest", "127.0.0.1", "-p", absl::StrCat(port)};
  client.insert(client.end(), test.begin(), test.end());
  const auto output = output_of(cores.initiator, client, environment, kLimit);
  if (!output.ok()) return output.status();
  return parse(*output, message_bytes);
}

}  // namespace

absl::StatusOr<Reference> ucx_baseline(Op op, size_t page_bytes, Cores cores) {
  const size_t message = std::min<size_t>(page_bytes, 16 << 20);
  const size_t count = std::clamp<size_t>((64 << 20) / message, 20, 20000);
  const char* test = op == Op::kRead ? "ucp_get" : "ucp_put_bw";
  Reference best{.name = "ucx_tcp"};
  absl::Status why;
  for (const char* window : {"", "16", "64"}) {
    std::vector<std::string> arguments = {"-t", test,
                                          "-s", absl::StrCat(message),
                                          "-n", absl::StrCat(count),
                                          "-w", absl::StrCat(std::max<size_t>(count / 20, 1)),
                                          "-f", "-v"};
    if (*window != '\0') arguments.insert(arguments.end(), {"-O", window});
    for (int i = 0; i < kAttempts; ++i) {
      const auto rate = attempt(arguments, message, cores);
      if (absl::IsNotFound(rate.status())) return rate.status();
      why = rate.status();
      if (!rate.ok()) continue;
      if (*rate > best.gb_per_s) {
        best.gb_per_s = *rate;
        best.note = absl::StrFormat("ucx_perftest -t %s -s %u%s%s", test, message,
                                    *window == '\0' ? "" : " -O ", window);
      }
      break;
    }
  }
  if (best.gb_per_s > 0) return best;
  return absl::UnavailableError(absl::StrCat("ucx_perftest: ", why.message()));
}

}  // namespace baton::bench
