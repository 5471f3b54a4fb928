// Workers that are reached by https, and what may be wrong there: the router says what it is, waits
// for nobody, and the other workers go on.
#include "tests/routing/fake_worker.h"
#include "tests/routing/routing_fixture.h"
#include "tests/temporary_folder.h"
#include "tests/test.h"
#include "tests/tls_files.h"

namespace baton::engine::serve {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

// Listens, and does with each connection what the test says, on a thread of its own.
class RawServer {
 public:
  explicit RawServer(std::function<void(int fd)> meet) : meet_(std::move(meet)) {
    listening_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    EXPECT_EQ(bind(listening_, reinterpret_cast<sockaddr*>(&address), size), 0);
    EXPECT_EQ(listen(listening_, 64), 0);
    EXPECT_EQ(getsockname(listening_, reinterpret_cast<sockaddr*>(&address), &size), 0);
    port_ = ntohs(address.sin_port);
    accepting_ = std::thread([this] { accept_all(); });
  }
  ~RawServer() {
    shutdown(listening_, SHUT_RDWR);
    accepting_.join();
    {
      const std::lock_guard lock(mutex_);
      for (const int fd : open_) shutdown(fd, SHUT_RDWR);
    }
    for (std::thread& thread : threads_) thread.join();
    for (const int fd : open_) close(fd);
    close(listening_);
  }
  std::string url() const { return absl::StrCat("https://localhost:", port_); }

 private:
  void accept_all() {
    for (int fd; (fd = accept4(listening_, nullptr, nullptr, SOCK_CLOEXEC)) >= 0;) {
      const std::lock_guard lock(mutex_);
      open_.push_back(fd);
      threads_.emplace_back([this, fd] {
        meet_(fd);
        shutdown(fd, SHUT_RDWR);
      });
    }
  }

  const std::function<void(int)> meet_;
  int listening_ = -1;
  int port_ = 0;
  std::mutex mutex_;
  std::vector<int> open_;
  std::vector<std::thread> threads_;
  std::thread accepting_;
};

// "" at its end.
std::string read_some(int fd) {
  char piece[16384];
  const ssize_t count = recv(fd, piece, sizeof(piece), 0);
  return {piece, count > 0 ? static_cast<size_t>(count) : 0};
}

void write_all(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t count = send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (count <= 0) return;
    bytes.remove_prefix(static_cast<size_t>(count));
  }
}

// Reads and says nothing until the other side leaves.
void stand_still(int fd) {
  while (!read_some(fd).empty()) {
  }
}

// Passes on what a client and the server at `port` say, at most so many bytes of the server's; then
// both ends are cut off, which is no end of TLS.
void pass_on(int fd, int port, size_t most) {
  const RawClient client(port);
  const int server = client.fd();
  std::thread there([&] {
    for (std::string bytes; !(bytes = read_some(fd)).empty();) write_all(server, bytes);
    shutdown(server, SHUT_WR);
  });
  for (std::string bytes; most > 0 && !(bytes = read_some(server)).empty();) {
    bytes.resize(std::min(bytes.size(), most));
    most -= bytes.size();
    write_all(fd, bytes);
  }
  shutdown(fd, SHUT_RDWR);
  there.join();
}

// One worker that is well, and one of which the test knows better.
class WorkerTls : public testing::Test {
 protected:
  WorkerTls()
      : well_(test_model(), {.blocks = 256}, {.listener = files_.options()}),
        want_(post_json(Worker().port(), request_body())["choices"]) {}

  static std::string https(const Worker& worker) {
    return absl::StrCat("https://localhost:", worker.port());
  }
  router::RouterOptions options(std::vector<std::string> decode) {
    router::RouterOptions options = options_for(std::move(decode));
    authorities_.file("ca.pem", files_.pem() + believed_);
    options.worker_ca = authorities_.path("ca.pem");
    // It is looked at once, by a probe that ends in time.
    options.health_timeout = in_time_;
    options.health_misses = 1;
    return options;
  }
  // What is said of a worker at `url`, beside which another one goes on.
  std::string why_down(const std::string& url) {
    const auto router = *router::Router::start(options({url, https(well_)}));
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(post_json(router->port(), request_body())["choices"], want_) << url;
    }
    const json page = health(router->port());
    EXPECT_EQ(page["status"], "ok");
    EXPECT_EQ(page["workers"][1]["up"], true) << page;
    EXPECT_EQ(page["workers"][0]["up"], false) << page;
    return page["workers"][0].value("why", "");
  }
  std::string why_down(const TlsFiles& files) {
    const Worker wrong(test_model(), {.blocks = 64}, {.listener = files.options()});
    return why_down(https(wrong));
  }
  std::string why_down(std::function<void(int)> meet) {
    const RawServer server(std::move(meet));
    return why_down(server.url());
  }

  const TlsFiles files_{"server"};
  Worker well_;
  const json want_;
  TemporaryFolder authorities_;
  std::string believed_;  // certificates besides `files_`
  milliseconds in_time_ = patient(milliseconds(500));
};

// Promise(serving): A worker whose TLS is wrong is not used, and clients are told why | the
//   handshake is part of connecting
TEST_F(WorkerTls, ACertificateThatIsNotBelievedIsNamed) {
  const TlsFiles stranger("stranger");
  EXPECT_THAT(why_down(stranger), HasSubstr("self-signed certificate"));
  // These are believed, and wrong all the same.
  const TlsFiles expired("expired", {.valid_from = -7200, .valid_until = -3600});
  believed_ = expired.pem();
  EXPECT_THAT(why_down(expired), HasSubstr("certificate has expired"));
  const TlsFiles early("early", {.valid_from = 3600});
  believed_ = early.pem();
  EXPECT_THAT(why_down(early), HasSubstr("certificate is not yet valid"));
  const TlsFiles other_host("other", {.host = "example.com"});
  believed_ = other_host.pem();
  EXPECT_THAT(why_down(other_host), HasSubstr("hostname mismatch"));
  EXPECT_THAT(why_down(absl::StrCat("https://127.0.0.1:", well_.port())),
              HasSubstr("IP address mismatch"));
}

TEST_F(WorkerTls, APlainTextWorkerIsNamed) {
  const Worker plain;
  EXPECT_THAT(why_down(https(plain)), HasSubstr("try an http:// URL"));
  EXPECT_THAT(why_down([](int fd) {
                read_some(fd);
                write_all(fd, "220 mail.example.com ESMTP\r\n");
                stand_still(fd);
              }),
              HasSubstr("try an http:// URL"));
  // And the other way round.
  EXPECT_THAT(why_down(absl::StrCat("http://localhost:", well_.port())),
              HasSubstr("try an https:// URL"));
}

TEST_F(WorkerTls, AHandshakeThatBreaksOffIsNamed) {
  const auto broken_off = HasSubstr("TLS failed: it closed the connection");
  EXPECT_THAT(why_down([](int) {}), broken_off);
  EXPECT_THAT(why_down([](int fd) { read_some(fd); }), broken_off);
  // In the middle of its part.
  for (const size_t most : {1, 5, 80, 600}) {
    EXPECT_THAT(why_down([&](int fd) { pass_on(fd, well_.port(), most); }), broken_off) << most;
  }
  // An alert: it wants none of this.
  EXPECT_THAT(why_down([](int fd) {
                read_some(fd);
                write_all(fd, std::string("\x15\x03\x03\x00\x02\x02\x28", 7));
              }),
              HasSubstr("TLS failed: "));
}

TEST_F(WorkerTls, AStalledHandshakeTimesOut) {
  in_time_ = patient(milliseconds(200));  // a worker that is well answers within it
  const auto late = HasSubstr("the TLS handshake was not over in time");
  EXPECT_THAT(why_down(stand_still), late);
  EXPECT_THAT(why_down([](int fd) {
                write_all(fd, std::string_view("\x16\x03\x03", 3));
                stand_still(fd);
              }),
              late);
}

// With nobody else to ask, its client hears what is wrong.
TEST_F(WorkerTls, WhereThereIsNoOtherClientsHearOfIt) {
  const Worker plain;
  const std::string url = https(plain);
  const auto router = *router::Router::start(options({url}));
  const httplib::Result refused = post(router->port(), request_body());
  EXPECT_EQ(refused->status, 503);
  EXPECT_THAT(refused->body, HasSubstr(url));
  EXPECT_THAT(refused->body, HasSubstr("try an http:// URL"));
}

// It was well when it was looked at.
TEST_F(WorkerTls, OneWhoseHandshakesStallLaterIsLeft) {
  std::atomic<bool> stopped{false};
  std::atomic<int> met{0};
  const RawServer server([&](int fd) {
    ++met;
    stopped ? stand_still(fd) : pass_on(fd, well_.port(), SIZE_MAX);
  });
  router::RouterOptions asking = options({server.url(), https(well_)});
  asking.health_interval = milliseconds(20);
  asking.comeback = std::chrono::hours(1);  // where the other one is late, too
  const auto router = *router::Router::start(asking);
  EXPECT_EQ(health(router->port())["workers"][0]["up"], true);
  stopped = true;
  const int before = met;
  EXPECT_EQ(post_json(router->port(), request_body())["choices"], want_);
  until([&] { return met > before; });
  until([&] { return health(router->port())["workers"][0]["up"] == false; });
}

// A connection that is cut is no end of an answer: whoever can cut it could shorten one else.
TEST_F(WorkerTls, AStreamThatIsCutGoesOnElsewhere) {
  const Streamed want = parse_stream(whole_answer());
  for (const size_t most : {2000, 3000, 4000, 5000}) {
    std::atomic<bool> probed{false};
    const RawServer server([&](int fd) {
      const bool is_probe = !probed.exchange(true);
      pass_on(fd, well_.port(), is_probe ? SIZE_MAX : most);
    });
    const auto router = *router::Router::start(options({server.url(), https(well_)}));
    const Streamed got = parse_stream(post(router->port(), stream_request())->body);
    EXPECT_TRUE(got.done);
    EXPECT_EQ(got.tokens, want.tokens);
    EXPECT_EQ(got.text, want.text);
    EXPECT_EQ(metric(router->port(), "baton_router_retries_total"), 1) << most;
  }
}

}  // namespace
}  // namespace baton::engine::serve
