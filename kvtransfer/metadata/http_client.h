// A small HTTP client over one connection: for stores of metadata, from one thread.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace baton::kvtransfer {

struct HttpReply {
  int status = 0;
  std::string body;
};

class HttpClient {
 public:
  using Headers = std::vector<std::pair<std::string, std::string>>;

  HttpClient(std::string host, std::string port);
  ~HttpClient();

  // Whatever the server answered. Unavailable: it did not, within 5 s; Cancelled: stop().
  absl::StatusOr<HttpReply> request(std::string_view method, const std::string& target,
                                    std::string_view body, const Headers& headers = {});
  // POSTs, and hands out the answer line by line as it comes, until it ends, `line` returns false,
  // or nothing came for `silence`.
  absl::Status stream(const std::string& target, std::string_view body,
                      std::chrono::milliseconds silence,
                      const std::function<bool(std::string_view line)>& line);
  // From any thread: ends the call under way, and all later ones.
  void stop();
  const std::string& where() const;  // host:port

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace baton::kvtransfer
