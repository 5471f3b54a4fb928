// The two sides of a benchmark: connecting, requests, refusals, the end.
#include "bench/report/dialogue.h"

#include <charconv>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace baton::bench {
namespace {

constexpr std::chrono::seconds kConnectTimeout(15);

}  // namespace

absl::Status split_address(const std::string& text, std::string& host, uint16_t& port) {
  std::string digits;
  const size_t colon = text.rfind(':');
  if (text.find_first_not_of("0123456789") == std::string::npos) {
    digits = text;
  } else if (text.front() == '[') {
    const size_t close = text.find(']');
    if (close == std::string::npos) {
      return absl::InvalidArgumentError("the [ has no ]: [IPV6]:PORT");
    }
    host = text.substr(1, close - 1);
    if (close + 1 < text.size()) digits = text.substr(close + 2);
  } else if (colon != std::string::npos && text.find(':') == colon) {
    host = text.substr(0, colon);
    digits = text.substr(colon + 1);
  } else {
    host = text;
  }
  if (digits.empty()) return absl::OkStatus();
  const auto end = digits.data() + digits.size();
  const auto number = std::from_chars(digits.data(), end, port);
  if (number.ec == std::errc() && number.ptr == end) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("\"%s\" has no port from 0 to 65535: write host:port", text));
}

absl::StatusOr<std::string> server_address(const std::string& text, uint16_t port) {
  std::string host;
  if (absl::Status status = split_address(text, host, port); !status.ok()) return status;
  if (host.empty()) host = "127.0.0.1";
  const bool v6 = host.find(':') != std::string::npos;
  return v6 ? absl::StrCat("[", host, "]:", port) : absl::StrCat(host, ":", port);
}

absl::StatusOr<PeerId> connect_to_server(Worker& worker, const std::string& address,
                                         const std::string& provider, std::string_view server) {
  const auto peer = worker.connect(address, provider);
  if (!peer.ok()) return peer.status();
  const absl::Status waited = worker.wait_until(
      [&] { return worker.peer_state(*peer) != PeerState::kConnecting; }, kConnectTimeout);
  if (!waited.ok()) {
    return absl::UnavailableError(
        absl::StrFormat("%s did not answer within %d s: is %s running there, and is its port open?",
                        address, kConnectTimeout.count(), server));
  }
  if (absl::Status status = worker.peer_status(*peer); !status.ok()) return status;
  return *peer;
}

absl::Status server_has_gone(Worker& worker, PeerId peer) {
  return absl::UnavailableError(
      absl::StrCat("the server has exited: ", std::string(worker.peer_status(peer).message())));
}

absl::StatusOr<Json> ask(Worker& worker, PeerId peer, const Json& question, const Hear& hear,
                         Time timeout) {
  if (!question.is_null()) {
    const absl::Status sent = worker.notify_detached(peer, question.dump());
    if (!sent.ok()) return sent;
  }
  std::string message;
  bool heard = false;
  const absl::Status waited = worker.wait_until(
      [&] {
        heard = heard || hear(message);
        return heard || worker.peer_state(peer) == PeerState::kDown;
      },
      timeout);
  if (!waited.ok()) {
    return absl::DeadlineExceededError(
        "the server does not answer: is it a server of this test, and is it still running?");
  }
  if (!heard) return server_has_gone(worker, peer);
  Json answer = parse_message(message);
  if (answer.is_null()) {
    return absl::InvalidArgumentError(
        "the server's answer is not a JSON object: run the same release on both sides");
  }
  if (const std::string error = text_of(answer, "error"); !error.empty()) {
    return absl::FailedPreconditionError(absl::StrCat("the server reports: ", error));
  }
  return answer;
}

void say_bye(Worker& worker, PeerId peer) {
  if (worker.peer_state(peer) != PeerState::kUp) return;
  if (const auto id = worker.notify(peer, R"({"do":"bye"})"); id.ok()) {
    worker.wait(*id, std::chrono::seconds(1)).IgnoreError();
  }
}

Json parse_message(std::string_view payload) {
  Json json = Json::parse(payload, nullptr, false);
  return json.is_object() ? json : Json();
}

std::string text_of(const Json& object, const char* key) {
  if (!object.is_object()) return "";
  const auto it = object.find(key);
  return it != object.end() && it->is_string() ? it->get<std::string>() : std::string();
}

Json refusal(const absl::Status& status) { return {{"error", std::string(status.message())}}; }

}  // namespace baton::bench
