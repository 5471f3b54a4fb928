// Shared by the tests of routing over real workers: a router's metrics, and waiting for them.
#pragma once

#include "absl/strings/numbers.h"
#include "engine/router/router.h"
#include "tests/engine_serve/http_fixture.h"
#include "tests/std.h"
#include "tests/temporary_folder.h"

namespace baton::engine::serve {

// A server's /metrics; "" if it does not answer.
inline std::string metrics_page(int port) {
  const httplib::Result page = client_of(port).Get("/metrics");
  return page ? page->body : "";
}

// The value of a line "NAME VALUE"; -1 where there is none.
inline int64_t metric(const std::string& page, const std::string& name) {
  const size_t at = page.find("\n" + name + " ");
  if (at == std::string::npos) return -1;
  const size_t begin = at + name.size() + 2;
  int64_t value = -1;
  const std::string text = page.substr(begin, page.find('\n', begin) - begin);
  return absl::SimpleAtoi(text, &value) ? value : -1;
}
inline int64_t metric(int port, const std::string& name) {
  return metric(metrics_page(port), name);
}

// "baton_router_NAME" of a worker.
inline int64_t of_worker(const std::string& page, const std::string& name, const std::string& url) {
  return metric(page, absl::StrCat("baton_router_", name, "{worker=\"", url, "\"}"));
}
inline int64_t of_worker(int router_port, const std::string& name, const std::string& url) {
  return of_worker(metrics_page(router_port), name, url);
}

// A directory with the tests' tokenizer, for a router.
class TokenizerFolder {
 public:
  TokenizerFolder() { folder_.file("tokenizer.json", test_tokenizer().to_json()); }
  const std::string& path() const { return folder_.path(); }
  TemporaryFolder& folder() { return folder_; }

 private:
  TemporaryFolder folder_;
};

// Workers of one model behind a router. Requests are sent one at a time, each when the router has
// heard what came of the one before: what goes where depends on nothing but their order.
class Fleet {
 public:
  // `follows`: the router has the tokenizer, and goes by what workers report.
  Fleet(size_t count, uint32_t blocks, bool follows = true,
        const http::HttpServerOptions& server = {}, const std::string& chat_template = "",
        const Model& model = test_model()) {
    if (!chat_template.empty()) tokenizer_.folder().file("chat_template.jinja", chat_template);
    router::RouterOptions options{.port = 0, .tokenizer = follows ? tokenizer_.path() : ""};
    options.health_interval = std::chrono::milliseconds(20);
    for (size_t i = 0; i < count; ++i) {
      workers.push_back(std::make_unique<Worker>(model, EngineOptions{.blocks = blocks}, server));
      options.decode.push_back(workers.back()->url());
    }
    router = *router::Router::start(options);
    follows_ = follows;
    settle();
  }

  json ask(const json& body, const char* path = "/v1/completions") {
    ++asked_;
    json answer = post_json(router->port(), body, path);
    prompt_tokens += answer["usage"]["prompt_tokens"].get<int64_t>();
    cached_tokens += answer["usage"]["prompt_tokens_details"]["cached_tokens"].get<int64_t>();
    settle();
    return answer;
  }
  // Of all workers.
  int64_t sum(const std::string& name) const {
    const std::string page = metrics_page(router->port());
    int64_t all = 0;
    for (const auto& worker : workers) all += of_worker(page, name, worker->url());
    return all;
  }

  std::vector<std::unique_ptr<Worker>> workers;
  std::unique_ptr<router::Router> router;
  int64_t prompt_tokens = 0;
  int64_t cached_tokens = 0;  // of them, as workers report

 private:
  void settle() {
    until([this] {
      uint64_t finished = 0;
      for (const auto& worker : workers) finished += worker->thread().stats().requests_finished;
      return finished == asked_ && sum("in_flight") == 0;
    });
    if (!follows_) return;
    until([this] {
      const std::string page = metrics_page(router->port());
      bool heard = true;
      for (const auto& worker : workers) {
        heard &= of_worker(page, "cache_known", worker->url()) == 1 &&
                 of_worker(page, "cache_changes", worker->url()) ==
                     static_cast<int64_t>(worker->thread().stats().cache_changes);
      }
      return heard;
    });
  }

  TokenizerFolder tokenizer_;
  bool follows_ = false;
  uint64_t asked_ = 0;
};

}  // namespace baton::engine::serve
