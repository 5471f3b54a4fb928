// As python/baton/weights.py does it: the digests of files, in a JSON list, and the digest of that.
#include "engine/handoff/checkpoint_digest.h"

#include <openssl/evp.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "engine/files/files.h"

namespace baton::engine::handoff {
namespace {

constexpr size_t kThreads = 8;
constexpr size_t kPiece = 1 << 20;

class Sha256 {
 public:
  Sha256() : context_(EVP_MD_CTX_new(), EVP_MD_CTX_free) {
    EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr);
  }
  void add(const void* bytes, size_t size) { EVP_DigestUpdate(context_.get(), bytes, size); }
  std::string hex() {
    std::array<unsigned char, EVP_MAX_MD_SIZE> digest;
    unsigned int size = 0;
    EVP_DigestFinal_ex(context_.get(), digest.data(), &size);
    return absl::BytesToHexString({reinterpret_cast<const char*>(digest.data()), size});
  }

 private:
  std::unique_ptr<EVP_MD_CTX, void (*)(EVP_MD_CTX*)> context_;
};

std::string sha256_of(std::string_view text) {
  Sha256 digest;
  digest.add(text.data(), text.size());
  return digest.hex();
}

absl::StatusOr<std::string> sha256_of_file(const std::string& path) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"),
                                                             std::fclose);
  if (file == nullptr) return absl::NotFoundError(absl::StrCat(path, " cannot be read"));
  Sha256 digest;
  std::vector<char> piece(kPiece);
  while (const size_t size = std::fread(piece.data(), 1, piece.size(), file.get())) {
    digest.add(piece.data(), size);
  }
  if (std::ferror(file.get()) != 0) {
    return absl::DataLossError(absl::StrCat("reading ", path, " failed"));
  }
  return digest.hex();
}

}  // namespace

absl::StatusOr<std::string> checkpoint_digest(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename();
    if (name.ends_with(".safetensors") && !name.starts_with('.')) names.push_back(name);
  }
  if (names.empty()) {
    return absl::NotFoundError(
        absl::StrCat(folder,
                     " has no *.safetensors: name its checkpoint by --kv-identity, with the same "
                     "name on all engines that serve it"));
  }
  std::sort(names.begin(), names.end());
  std::vector<absl::StatusOr<std::string>> digests(names.size(), std::string());
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i = next++; i < names.size(); i = next++) {
      digests[i] = sha256_of_file(absl::StrCat(folder, "/", names[i]));
    }
  };
  std::vector<std::thread> threads;
  for (size_t i = 1; i < std::min(kThreads, names.size()); ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();

  std::string list;
  for (size_t i = 0; i < names.size(); ++i) {
    if (!digests[i].ok()) return digests[i].status();
    absl::StrAppend(&list, list.empty() ? "" : ", ", "[\"", names[i], "\", \"", *digests[i], "\"]");
  }
  const absl::StatusOr<std::string> config = read_file(absl::StrCat(folder, "/config.json"));
  if (!config.ok()) return config.status();
  return sha256_of(absl::StrCat("[\"", sha256_of(absl::StrCat("[", list, "]")), "\", \"",
                                sha256_of(*config), "\"]"));
}

}  // namespace baton::engine::handoff
