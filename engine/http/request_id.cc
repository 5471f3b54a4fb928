// Random ids from OpenSSL's generator.
#include "engine/http/request_id.h"

#include <openssl/rand.h>

#include <algorithm>
#include <array>
#include <random>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"

namespace baton::engine::http {

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
