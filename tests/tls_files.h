// Certificates and keys as PEM files, right and wrong ones.
#pragma once

#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include "engine/http/http_listener.h"
#include "tests/temporary_folder.h"
#include "tests/test.h"

namespace baton {

struct TlsKind {
  const char* host = "localhost";
  // From now on, in seconds.
  long valid_from = -3600;
  long valid_until = 24 * 3600;
};

// A certificate that signs itself, and its key.
struct TlsFiles {
  explicit TlsFiles(const char* name, const TlsKind& kind = {})
      : certificate(folder.path() + "/" + name + ".pem"), key(folder.path() + "/" + name + ".key") {
    EVP_PKEY* pair = EVP_EC_gen("P-256");
    X509* made = X509_new();
    X509_set_version(made, 2);
    ASN1_INTEGER_set(X509_get_serialNumber(made), 1);
    X509_gmtime_adj(X509_getm_notBefore(made), kind.valid_from);
    X509_gmtime_adj(X509_getm_notAfter(made), kind.valid_until);
    X509_set_pubkey(made, pair);
    X509_NAME* subject = X509_get_subject_name(made);
    X509_NAME_add_entry_by_txt(subject, "CN", MBSTRING_ASC,
                               reinterpret_cast<const unsigned char*>(kind.host), -1, -1, 0);
    // Issuers are looked up by their names: no two are equal.
    X509_NAME_add_entry_by_txt(subject, "O", MBSTRING_ASC,
                               reinterpret_cast<const unsigned char*>(name), -1, -1, 0);
    X509_set_issuer_name(made, subject);
    EXPECT_GT(X509_sign(made, pair, EVP_sha256()), 0);
    FILE* file = std::fopen(certificate.c_str(), "w");
    EXPECT_EQ(PEM_write_X509(file, made), 1);
    std::fclose(file);
    file = std::fopen(key.c_str(), "w");
    EXPECT_EQ(PEM_write_PrivateKey(file, pair, nullptr, nullptr, 0, nullptr, nullptr), 1);
    std::fclose(file);
    X509_free(made);
    EVP_PKEY_free(pair);
  }
  std::string pem() const {
    std::ifstream file(certificate);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  engine::http::HttpListenerOptions options() const {
    engine::http::HttpListenerOptions options;
    options.tls_certificate = certificate;
    options.tls_key = key;
    return options;
  }
  const TemporaryFolder folder;
  const std::string certificate, key;
};

}  // namespace baton
