// Request ids and API keys.
#include "engine/http/request_check.h"

#include <openssl/crypto.h>
#include <openssl/rand.h>

#include <algorithm>
#include <array>
#include <random>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "engine/http/openai/openai_reply.h"
#include "engine/serve/prometheus_text.h"

namespace baton::engine::http {
namespace {

constexpr std::array kOpenPaths = {std::string_view("/health"), std::string_view("/metrics"),
                                   std::string_view("/version"),
                                   std::string_view("/v1/baton/address")};
constexpr std::string_view kBearer = "Bearer ";

}  // namespace

void mark_request(HttpExchange* exchange) {
  const std::string_view given = exchange->request().header("x-request-id");
  std::string id = is_request_id(given) ? std::string(given) : make_request_id();
  exchange->add_header(kRequestIdHeader, id);
  exchange->set_request_id(std::move(id));
}

std::vector<std::string> always_answered() { return {kOpenPaths.begin(), kOpenPaths.end()}; }

void print_connections(const HttpListenerStats& stats, std::string* page) {
  serve::PrometheusPage out("baton_http_", page);
  out.single("connections", "Open connections.", "gauge", stats.connections);
  out.single("answering", "Requests not answered yet.", "gauge", stats.answering);
  out.single("refused_total", "Connections closed for want of room.", "counter", stats.refused);
  out.single("timed_out_total", "Clients too slow.", "counter", stats.timed_out);
}

bool check_api_key(std::string_view key, HttpExchange* exchange) {
  const HttpRequest& request = exchange->request();
  if (key.empty() ||
      std::find(kOpenPaths.begin(), kOpenPaths.end(), request.path) != kOpenPaths.end()) {
    return true;
  }
  std::string_view given = request.header("authorization");
  if (given.size() > kBearer.size() &&
      absl::EqualsIgnoreCase({given.data(), kBearer.size()}, {kBearer.data(), kBearer.size()})) {
    given.remove_prefix(kBearer.size());
    // In the same time whichever byte differs.
    if (given.size() == key.size() && CRYPTO_memcmp(given.data(), key.data(), key.size()) == 0) {
      return true;
    }
  }
  exchange->reply(401, "application/json",
                  api_error(401, "this server asks for its key: send Authorization: Bearer KEY"),
                  {{"WWW-Authenticate", "Bearer"}});
  return false;
}

std::string make_request_id() {
  std::array<unsigned char, 16> bytes{};
  if (RAND_bytes(bytes.data(), static_cast<int>(bytes.size())) != 1) {
    std::random_device device;
    for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(device());
  }
  return absl::BytesToHexString({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
}

bool is_request_id(std::string_view id) {
  return !id.empty() && id.size() <= 128 && std::all_of(id.begin(), id.end(), [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) ||
           std::string_view("-_.:").find(c) != std::string_view::npos;
  });
}

}  // namespace baton::engine::http
