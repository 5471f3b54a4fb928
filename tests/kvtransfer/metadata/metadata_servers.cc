// The folder, the HTTP server, and etcd.
#include "tests/kvtransfer/metadata/metadata_servers.h"

#include <httplib.h>

#include "tests/held_port.h"
#include "tests/std.h"
#include "tests/temporary_folder.h"
#include "tests/until.h"
#include "transport/base/child.h"

namespace baton::kvtransfer {
namespace {

class Folder : public MetadataServer {
 public:
  std::string url() const override { return "file://" + folder_.path(); }
  void kill() override {}
  void start() override {}

 private:
  TemporaryFolder folder_;
};

// Keeps what is put under a path.
class HttpServer : public MetadataServer {
 public:
  HttpServer() { start(); }
  ~HttpServer() override { kill(); }
  std::string url() const override {
    return "http://127.0.0.1:" + std::to_string(port_) + "/agents";
  }
  void start() override {
    server_ = std::make_unique<httplib::Server>();
    server_->set_tcp_nodelay(true);  // it sends its answers in pieces
    server_->Put("/.*", [this](const httplib::Request& request, httplib::Response&) {
      std::lock_guard lock(mutex_);
      kept_[request.path] = request.body;
    });
    server_->Get("/.*", [this](const httplib::Request& request, httplib::Response& response) {
      std::lock_guard lock(mutex_);
      const auto at = kept_.find(request.path);
      if (at == kept_.end()) {
        response.status = 404;
      } else {
        response.set_content(at->second, "application/octet-stream");
      }
    });
    server_->Delete("/.*", [this](const httplib::Request& request, httplib::Response&) {
      std::lock_guard lock(mutex_);
      kept_.erase(request.path);
    });
    if (port_ == 0) port_ = quiet_port();
    ASSERT_TRUE(server_->bind_to_port("127.0.0.1", port_));
    thread_ = std::thread([this] { server_->listen_after_bind(); });
  }
  void kill() override {
    until([&] { return server_->is_running(); });
    server_->stop();
    if (thread_.joinable()) thread_.join();
  }

 private:
  int port_ = 0;
  std::unique_ptr<httplib::Server> server_;
  std::thread thread_;
  std::mutex mutex_;
  std::map<std::string, std::string> kept_;
};

class Etcd : public MetadataServer {
 public:
  explicit Etcd(std::string program) : program_(std::move(program)) { start(); }
  ~Etcd() override { kill(); }
  std::string url() const override {
    return "etcd://127.0.0.1:" + std::to_string(port_) + "/test/agents";
  }
  // Its ports are not among those that the kernel gives to callers, so they stay its own while it
  // is dead.
  void start() override {
    const bool first = port_ == 0;
    for (int tries = 0; tries < 50; ++tries) {
      if (first) {
        port_ = quiet_port();
        peer_port_ = quiet_port();
      }
      if (run()) return;
    }
    FAIL() << "etcd did not start";
  }
  void kill() override {
    if (process_ <= 0) return;
    ::kill(process_, SIGKILL);
    waitpid(process_, nullptr, 0);
    process_ = 0;
  }

 private:
  bool run() {
    const std::string client = "http://127.0.0.1:" + std::to_string(port_);
    const std::string peer = "http://127.0.0.1:" + std::to_string(peer_port_);
    const std::string cluster = "default=" + peer, data = folder_.path("data");
    process_ = base::fork_child();
    if (process_ == 0) {
      const int null = ::open("/dev/null", O_WRONLY);
      dup2(null, 1);
      dup2(null, 2);
      execl(program_.c_str(), "etcd", "--data-dir", data.c_str(), "--listen-client-urls",
            client.c_str(), "--advertise-client-urls", client.c_str(), "--listen-peer-urls",
            peer.c_str(), "--initial-advertise-peer-urls", peer.c_str(), "--initial-cluster",
            cluster.c_str(), nullptr);
      _exit(127);
    }
    httplib::Client ask("127.0.0.1", port_);
    while (waitpid(process_, nullptr, WNOHANG) == 0) {
      if (const auto health = ask.Get("/health"); health && health->status == 200) return true;
      usleep(20'000);
    }
    process_ = 0;  // its port was taken by somebody else
    return false;
  }

  const std::string program_;
  TemporaryFolder folder_;
  int port_ = 0, peer_port_ = 0;
  pid_t process_ = 0;
};

}  // namespace

std::unique_ptr<MetadataServer> make_metadata_server(const std::string& kind, std::string& why) {
  if (kind == "file") return std::make_unique<Folder>();
  if (kind == "http") return std::make_unique<HttpServer>();
  for (const char* program : {"/usr/bin/etcd", "/usr/local/bin/etcd"}) {
    if (access(program, X_OK) == 0) return std::make_unique<Etcd>(program);
  }
  why = "no etcd here (Debian: etcd-server; ./run install-deps all installs it)";
  return nullptr;
}

}  // namespace baton::kvtransfer
