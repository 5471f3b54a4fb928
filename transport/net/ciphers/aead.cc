// AES-256-GCM through OpenSSL's EVP, piece by piece.
#include "transport/net/ciphers/aead.h"

#include <array>
#include <cstring>

namespace baton::net {
namespace {

unsigned char* raw(void* data) { return static_cast<unsigned char*>(data); }
const unsigned char* raw(const void* data) { return static_cast<const unsigned char*>(data); }

}  // namespace

Aead::Aead(const Key32& key, Direction direction)
    : context_(EVP_CIPHER_CTX_new(), &EVP_CIPHER_CTX_free), seals_(direction == Direction::kSeal) {
  works_ = context_ != nullptr && EVP_CipherInit_ex(context_.get(), EVP_aes_256_gcm(), nullptr,
                                                    key.data(), nullptr, seals_ ? 1 : 0) == 1;
}

void Aead::start(uint64_t number) {
  std::array<unsigned char, 12> nonce{};
  std::memcpy(nonce.data() + 4, &number, sizeof number);
  works_ =
      works_ && EVP_CipherInit_ex(context_.get(), nullptr, nullptr, nullptr, nonce.data(), -1) == 1;
}

void Aead::authenticate(const void* data, size_t bytes) {
  int done = 0;
  works_ = works_ && EVP_CipherUpdate(context_.get(), nullptr, &done, raw(data),
                                      static_cast<int>(bytes)) == 1;
}

void Aead::crypt(const void* from, size_t bytes, void* to) {
  int done = 0;
  works_ = works_ && EVP_CipherUpdate(context_.get(), raw(to), &done, raw(from),
                                      static_cast<int>(bytes)) == 1;
  if (!works_) std::memset(to, 0, bytes);  // it may have been there, unsealed
}

void Aead::seal(void* tag) {
  int done = 0;
  unsigned char nothing[EVP_MAX_BLOCK_LENGTH];
  works_ = works_ && EVP_CipherFinal_ex(context_.get(), nothing, &done) == 1 &&
           EVP_CIPHER_CTX_ctrl(context_.get(), EVP_CTRL_GCM_GET_TAG, kTagBytes, tag) == 1;
  if (!works_) std::memset(tag, 0, kTagBytes);
}

bool Aead::open(const void* tag) {
  int done = 0;
  unsigned char nothing[EVP_MAX_BLOCK_LENGTH];
  unsigned char expected[kTagBytes];
  std::memcpy(expected, tag, sizeof expected);
  return works_ &&
         EVP_CIPHER_CTX_ctrl(context_.get(), EVP_CTRL_GCM_SET_TAG, kTagBytes, expected) == 1 &&
         EVP_CipherFinal_ex(context_.get(), nothing, &done) == 1;
}

}  // namespace baton::net
