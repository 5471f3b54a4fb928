// HTTP servers that are broken, slow to close or a stranger's; and records that are others'.
#include <arpa/inet.h>
#include <httplib.h>
#include <netinet/in.h>

#include "kvtransfer/metadata/http_client.h"
#include "kvtransfer/metadata/http_store.h"
#include "kvtransfer/metadata/metadata_store.h"
#include "tests/test.h"
#include "tests/until.h"
#include "transport/base/unique_fd.h"

namespace baton::kvtransfer {
namespace {

using std::chrono::milliseconds;
using ::testing::ElementsAre;

constexpr milliseconds kLongSilence = std::chrono::minutes(10);

// Hands each connection, one after the other, to the test: what it does is all that happens there.
class RawServer {
 public:
  explicit RawServer(std::function<void(int number, int fd)> serve)
      : listener_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof at;
    EXPECT_EQ(::bind(listener_.get(), reinterpret_cast<sockaddr*>(&at), size), 0);
    EXPECT_EQ(::listen(listener_.get(), 8), 0);
    EXPECT_EQ(::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&at), &size), 0);
    port_ = std::to_string(ntohs(at.sin_port));
    thread_ = std::thread([this, serve = std::move(serve)] {
      std::vector<base::UniqueFd> open;  // none is closed before the end
      for (int number = 0;; ++number) {
        open.emplace_back(::accept(listener_.get(), nullptr, nullptr));
        if (!open.back().valid()) return;
        connections = number + 1;
        serve(number, open.back().get());
      }
    });
  }
  ~RawServer() {
    ::shutdown(listener_.get(), SHUT_RDWR);
    thread_.join();
  }
  const std::string& port() const { return port_; }
  // Reads the head of a question; "" at the end.
  static std::string question(int fd) {
    std::string out;
    while (out.find("\r\n\r\n") == std::string::npos) {
      char byte = 0;
      if (::recv(fd, &byte, 1, 0) != 1) return "";
      out += byte;
    }
    return out;
  }
  static bool say(int fd, std::string_view text) {
    return ::send(fd, text.data(), text.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(text.size());
  }
  std::atomic<int> connections{0};

 private:
  const base::UniqueFd listener_;
  std::string port_;
  std::thread thread_;
};

TEST(HttpClients, OneConnectionIsUsedAgainUntilTheServerIsToCloseIt) {
  RawServer server([](int number, int fd) {
    for (int i = 0; i < 2; ++i) {
      if (RawServer::question(fd).empty()) return;
      RawServer::say(fd, absl::StrCat("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n",
                                      i == 1 ? "Connection: close\r\n" : "", "\r\n", number, i));
    }
  });
  HttpClient client("127.0.0.1", server.port());
  std::vector<std::string> answers;
  for (int i = 0; i < 4; ++i) {
    const auto reply = client.request("GET", "/", {});
    answers.push_back(reply.ok() ? reply->body : std::string(reply.status().message()));
  }
  EXPECT_THAT(answers, ElementsAre("00", "01", "10", "11"));
  EXPECT_EQ(server.connections, 2);
}

TEST(HttpClients, AnswersThatAreCutShortOrTooLongAreErrors) {
  RawServer server([](int number, int fd) {
    RawServer::question(fd);
    if (number == 0) RawServer::say(fd, "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort");
    if (number == 1) RawServer::say(fd, "HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n");
    if (number == 2) RawServer::say(fd, "no HTTP at all\r\n\r\n");
    ::shutdown(fd, SHUT_RDWR);
  });
  HttpClient client("127.0.0.1", server.port());
  for (int i = 0; i < 4; ++i) {
    const absl::Status answer = client.request("GET", "/", {}).status();
    EXPECT_TRUE(absl::IsUnavailable(answer)) << i << ": " << answer;
  }
}

TEST(HttpClients, AHostThatIsNotThereIsAnError) {
  HttpClient client("no such host", "80");
  EXPECT_TRUE(absl::IsUnavailable(client.request("GET", "/", {}).status()));
  EXPECT_TRUE(absl::IsUnavailable(
      client.stream("/", {}, kLongSilence, [](std::string_view) { return true; })));
}

constexpr char kChunked[] = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";

TEST(HttpClients, AClientMayCloseEarly) {
  RawServer server([](int, int fd) {
    RawServer::question(fd);
    RawServer::say(fd, kChunked);
    RawServer::say(fd, "e\r\none\ntwo\nthree\n\r\n");  // and no more, for ever
  });
  HttpClient client("127.0.0.1", server.port());
  std::vector<std::string> heard;
  const absl::Status ended = client.stream("/", {}, kLongSilence, [&](std::string_view line) {
    heard.emplace_back(line);
    return line != "two";
  });
  EXPECT_EQ(ended, absl::OkStatus());
  EXPECT_THAT(heard, ElementsAre("one", "two"));
}

TEST(HttpClients, ASilentServerTimesOut) {
  RawServer server([](int, int fd) {
    RawServer::question(fd);
    RawServer::say(fd, kChunked);
    RawServer::say(fd, "6\r\none\ntw\r\n");
  });
  HttpClient client("127.0.0.1", server.port());
  std::vector<std::string> heard;
  const absl::Status ended = client.stream("/", {}, milliseconds(50), [&](std::string_view line) {
    heard.emplace_back(line);
    return true;
  });
  EXPECT_TRUE(absl::IsUnavailable(ended)) << ended;
  EXPECT_THAT(heard, ::testing::AnyOf(ElementsAre(), ElementsAre("one")));
}

// Of a line that never ends no more is kept than of metadata.
TEST(HttpClients, ALineWithoutAnEndIsNotReadForEver) {
  std::atomic<uint64_t> sent{0};
  RawServer server([&](int, int fd) {
    RawServer::question(fd);
    RawServer::say(fd, kChunked);
    const std::string chunk = "100000\r\n" + std::string(0x100000, 'x') + "\r\n";
    while (RawServer::say(fd, chunk)) sent += chunk.size();
  });
  HttpClient client("127.0.0.1", server.port());
  EXPECT_EQ(client.stream("/", {}, kLongSilence, [](std::string_view) { return true; }),
            absl::OkStatus());
  EXPECT_GE(sent, 2 * kMaxStoredMetadata - (1 << 20));
}

constexpr char kAnothers[] = "BATON1 another 7 60000\nmetadata";

// Keeps one record, and says what was asked. The test puts there what it likes.
struct HttpRecords : ::testing::Test {
  HttpRecords() {
    server.set_tcp_nodelay(true);
    server.Get("/.*", [this](const httplib::Request&, httplib::Response& response) {
      asked += 'G';
      response.status = get_status;
      response.set_content(record, "application/octet-stream");
    });
    server.Put("/.*", [this](const httplib::Request& request, httplib::Response& response) {
      asked += 'P';
      response.status = put_status;
      if (put_status == 200) record = request.body;
      if (meanwhile) meanwhile();
    });
    server.Delete("/.*", [this](const httplib::Request&, httplib::Response&) { asked += 'D'; });
    const int port = server.bind_to_any_port("127.0.0.1");
    serves = std::thread([this] { server.listen_after_bind(); });
    until([&] { return server.is_running(); });
    store.emplace("127.0.0.1", std::to_string(port), "/agents", milliseconds(1));
  }
  ~HttpRecords() override {
    store.reset();
    server.stop();
    serves.join();
  }
  // Nothing is asked while the test looks.
  std::string take_asked() { return std::exchange(asked, {}); }
  httplib::Server server;
  std::thread serves;
  std::string record, asked;
  int get_status = 200, put_status = 200;
  std::function<void()> meanwhile;  // after a put
  std::optional<HttpStore> store;
};

TEST_F(HttpRecords, ConcurrentPutsDetectEachOther) {
  get_status = 404;
  meanwhile = [this] {
    get_status = 200;
    record = kAnothers;
  };
  EXPECT_TRUE(absl::IsAlreadyExists(store->put("key", "ours")));
  EXPECT_EQ(take_asked(), "GPG");
  EXPECT_EQ(store->remove("key"), absl::OkStatus());
  EXPECT_EQ(take_asked(), "") << "it is not ours";
  get_status = 404;
  meanwhile = [this] { get_status = 500; };
  EXPECT_TRUE(absl::IsUnavailable(store->put("key", "ours")));
  EXPECT_EQ(take_asked(), "GPG");
}

TEST_F(HttpRecords, OnlyWhatIsOursIsRemoved) {
  const auto put = [&] {
    get_status = 200;
    record = "none";
    ASSERT_EQ(store->put("key", "ours"), absl::OkStatus());
    take_asked();
  };
  put();
  get_status = 500;
  EXPECT_TRUE(absl::IsUnavailable(store->remove("key")));
  EXPECT_EQ(take_asked(), "G");
  put();
  get_status = 404;
  EXPECT_EQ(store->remove("key"), absl::OkStatus());
  EXPECT_EQ(take_asked(), "G");
  put();
  record = kAnothers;
  EXPECT_EQ(store->remove("key"), absl::OkStatus());
  EXPECT_EQ(take_asked(), "G");
  put();
  EXPECT_EQ(store->remove("key"), absl::OkStatus());
  EXPECT_EQ(take_asked(), "GD");
}

// A server of strangers, or one that is broken.
TEST_F(HttpRecords, AnAnswerIsARecordOrRefused) {
  record = kAnothers;
  EXPECT_EQ(store->get("key").value_or("none"), "metadata");
  for (const char* bad :
       {"", "metadata", "BATON1 another 7 60000", "BATON1 another 7\n",
        "BATON1 another 7 60000 8\n", "BATON2 another 7 60000\n", "BATON1 another seven 60000\n",
        "BATON1 another 7 long\n", "BATON1 another 7 0\n", "BATON1 another 7 -60000\n",
        "BATON1 another 7 86400001\n"}) {
    record = bad;
    EXPECT_TRUE(absl::IsDataLoss(store->get("key").status())) << bad;
  }
  for (const int status : {201, 301, 403, 500}) {
    get_status = status;
    EXPECT_TRUE(absl::IsUnavailable(store->get("key").status())) << status;
    EXPECT_TRUE(absl::IsUnavailable(store->put("key", "ours"))) << status;
  }
  for (const int status : {404, 410}) {
    get_status = status;
    EXPECT_TRUE(absl::IsNotFound(store->get("key").status())) << status;
    EXPECT_TRUE(absl::IsUnavailable(store->put("key", "ours"))) << "it keeps nothing";
  }
  get_status = 200;
  put_status = 500;
  record = "no record";  // is replaced
  EXPECT_TRUE(absl::IsUnavailable(store->put("key", "ours")));
  put_status = 200;
  EXPECT_EQ(store->put("key", "ours"), absl::OkStatus());
  EXPECT_EQ(store->renew(), absl::OkStatus());
  put_status = 500;
  EXPECT_TRUE(absl::IsUnavailable(store->renew()));
  record = "no record";
  EXPECT_TRUE(absl::IsDataLoss(store->renew()));
  record = kAnothers;
  EXPECT_TRUE(absl::IsAlreadyExists(store->renew()));
  get_status = 404;
  EXPECT_TRUE(absl::IsNotFound(store->renew()));
}

}  // namespace
}  // namespace baton::kvtransfer
