/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LARDER_FORMAT_VERSION_H
#define LARDER_FORMAT_VERSION_H

#define LARDER_VERSION_STRING       "0.1.0"
#define STORE_VERSION               1u /* layout of a store directory, and of the small records in it */
#define SEGMENT_VERSION             1u
#define COMMIT_VERSION              1u
#define ENVELOPE_VERSION            1u
#define SAMPLES_VERSION             1u
#define PUBLISHED_VERSION           1u
#define PROTOCOL_VERSION            1u
#define SUITE_AES256GCM_HKDF_SHA256 1u /* AES-256-GCM, HKDF-SHA256; the only suite of version 1 */

#endif
