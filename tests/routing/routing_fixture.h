// Shared by the tests of routing over real workers: a router's metrics.
#pragma once

#include "absl/strings/numbers.h"
#include "engine/router/router.h"
#include "tests/engine_serve/http_fixture.h"

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

}  // namespace baton::engine::serve
