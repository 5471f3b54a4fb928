// The client, over Boost.Beast. Each step has a time limit, so none blocks for ever.
#include "kvtransfer/metadata/http_client.h"

#include <algorithm>
#include <atomic>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http/read.hpp>
#include <boost/beast/http/string_body.hpp>
#include <boost/beast/http/write.hpp>
#include <optional>

#include "absl/strings/str_cat.h"
#include "kvtransfer/metadata/metadata_store.h"

namespace baton::kvtransfer {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using asio::ip::tcp;
using boost::system::error_code;
using Request = http::request<http::string_body>;
using Parser = http::response_parser<http::string_body>;

constexpr std::chrono::seconds kConnect{2};
constexpr std::chrono::seconds kAnswer{5};

}  // namespace

class HttpClient::Impl {
 public:
  Impl(std::string host, std::string port)
      : host_(std::move(host)), port_(std::move(port)), where_(absl::StrCat(host_, ":", port_)) {}

  // Sends, and reads the head of the answer. A server may have closed a connection that was idle:
  // then once more over another.
  absl::Status begin(std::string_view method, const std::string& target, std::string_view body,
                     const Headers& headers) {
    Request request;
    request.method_string({method.data(), method.size()});
    request.target(target);
    request.version(11);
    request.set(http::field::host, where_);
    for (const auto& [name, value] : headers) request.set(name, value);
    request.body() = std::string(body);
    request.prepare_payload();
    for (bool old = stream_.has_value();; old = false) {
      error_code failed = old ? error_code() : connect();
      if (!failed) failed = exchange(request);
      if (!failed) return absl::OkStatus();
      stream_.reset();
      if (stopped_) return absl::CancelledError("stopped");
      if (!old || failed == beast::error::timeout) return unavailable(failed);
    }
  }

  error_code read_some(std::chrono::milliseconds limit) {
    stream_->expires_after(limit);
    return run([&](auto done) { http::async_read_some(*stream_, buffer_, *parser_, done); });
  }

  Parser& parser() { return *parser_; }
  void keep() {
    if (!parser_->get().keep_alive()) drop();
  }
  void drop() { stream_.reset(); }
  bool stopped() const { return stopped_; }
  const std::string& where() const { return where_; }
  absl::Status unavailable(error_code why) const {
    if (stopped_) return absl::CancelledError("stopped");
    return absl::UnavailableError(absl::StrCat(where_, " does not answer: ", why.message()));
  }

  void stop() {
    stopped_ = true;
    asio::post(context_, [this] {
      if (stream_) stream_->close();
    });
  }

 private:
  // Starts an operation and runs it to its end, which stop() and the stream's limit bring about.
  template <typename Start>
  error_code run(Start&& start) {
    error_code out = asio::error::would_block;
    start([&out](error_code error, auto&&...) { out = error; });
    context_.restart();
    // Not to the last handler: one of stop() may come and go.
    while (out == asio::error::would_block && context_.run_one() > 0) {
    }
    return stopped_ ? asio::error::operation_aborted : out;
  }

  error_code connect() {
    if (stopped_) return asio::error::operation_aborted;
    error_code error;
    tcp::resolver resolver(context_);
    const auto found = resolver.resolve(host_, port_, error);
    if (error) return error;
    stream_.emplace(context_);
    buffer_.clear();
    stream_->expires_after(kConnect);
    error = run([&](auto done) { stream_->async_connect(found, done); });
    if (!error) stream_->socket().set_option(tcp::no_delay(true), error);
    return error;
  }

  error_code exchange(const Request& request) {
    parser_.emplace();
    parser_->body_limit(kMaxStoredMetadata * 2);
    stream_->expires_after(kAnswer);
    const error_code failed = run([&](auto done) { http::async_write(*stream_, request, done); });
    if (failed) return failed;
    return run([&](auto done) { http::async_read_header(*stream_, buffer_, *parser_, done); });
  }

  const std::string host_, port_, where_;
  asio::io_context context_;
  std::optional<beast::tcp_stream> stream_;
  beast::flat_buffer buffer_;
  std::optional<Parser> parser_;
  std::atomic<bool> stopped_{false};
};

HttpClient::HttpClient(std::string host, std::string port)
    : impl_(std::make_unique<Impl>(std::move(host), std::move(port))) {}
HttpClient::~HttpClient() = default;

absl::StatusOr<HttpReply> HttpClient::request(std::string_view method, const std::string& target,
                                              std::string_view body, const Headers& headers) {
  if (absl::Status begun = impl_->begin(method, target, body, headers); !begun.ok()) return begun;
  while (!impl_->parser().is_done()) {
    if (const error_code failed = impl_->read_some(kAnswer)) {
      impl_->drop();
      return impl_->unavailable(failed);
    }
  }
  HttpReply out{static_cast<int>(impl_->parser().get().result_int()),
                std::move(impl_->parser().get().body())};
  impl_->keep();
  return out;
}

absl::Status HttpClient::stream(const std::string& target, std::string_view body,
                                std::chrono::milliseconds silence,
                                const std::function<bool(std::string_view line)>& line) {
  impl_->drop();
  if (absl::Status begun = impl_->begin("POST", target, body, {}); !begun.ok()) return begun;
  impl_->parser().body_limit(boost::none);
  std::string& text = impl_->parser().get().body();
  size_t searched = 0;  // of it, without finding the end of a line
  for (bool going = true; going && !impl_->parser().is_done();) {
    if (const error_code failed = impl_->read_some(silence)) {
      impl_->drop();
      return impl_->unavailable(failed);
    }
    size_t begin = 0;
    for (size_t end;
         going && (end = text.find('\n', std::max(begin, searched))) != std::string::npos;) {
      going = line(std::string_view(text).substr(begin, end - begin));
      begin = end + 1;
    }
    text.erase(0, begin);
    searched = text.size();
    if (text.size() > 2 * kMaxStoredMetadata) going = false;
  }
  impl_->drop();
  return absl::OkStatus();
}

void HttpClient::stop() { impl_->stop(); }
const std::string& HttpClient::where() const { return impl_->where(); }

}  // namespace baton::kvtransfer
